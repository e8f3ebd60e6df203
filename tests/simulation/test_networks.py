"""What simulations rest on: the world's clock, links that carry calls, and links for bulk transfer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from swarm.plan.simulate.world import World
from swarm.types import NodeId
from tests.simulator.broadcast.network import BulkNetwork, NetworkShape
from tests.simulator.network import LinkShape, Network, Reply

TIMEOUT_S = 5.0
S, A, B = NodeId("source"), NodeId("a"), NodeId("b")


def run(world: World) -> None:
    world.run_until(lambda: False)


def test_events_of_one_time_run_in_their_order_and_the_digest_is_of_times_and_labels() -> None:
    worlds = []
    for names in ("bca", "bca", "bcx"):
        world, seen = World(Random(0)), list[str]()
        for name in names:
            world.schedule(1.0, name, lambda name=name, seen=seen: seen.append(name))  # type: ignore[misc]
        run(world)
        assert (seen, world.now, world.events) == ([*names], 1.0, 3)
        worlds.append(world.trace_digest())
    assert worlds[0] == worlds[1] != worlds[2]


def links(*, loss_share: float = 0.0) -> tuple[World, Network]:
    world = World(Random(0))
    shape = LinkShape(latency_s=0.5, jitter_s=0.0, loss_share=loss_share, bytes_per_s=100.0)
    return world, Network(world, shape)


def call(world: World, network: Network, nbytes: int = 0) -> tuple[list[float], list[tuple[str, float]]]:
    """One call from a to b; when its handler ran, and how it ended."""
    handled: list[float] = []
    ends: list[tuple[str, float]] = []

    def handler(reply: Reply[str]) -> None:
        handled.append(world.now)
        reply("answer", 0)

    def failed() -> None:
        ends.append(("failure", world.now))

    network.request("a", "b", nbytes, handler, lambda said: ends.append((said, world.now)), failed, timeout_s=TIMEOUT_S)
    return handled, ends


@pytest.mark.parametrize(
    ("nbytes", "loss_share", "handled", "end"),
    [
        ([200], 0.0, [2.5], ("answer", 3.0)),
        ([100, 100], 0.0, [2.5], ("answer", 3.0)),
        ([0], 1.0, [], ("failure", TIMEOUT_S)),
        ([1000], 0.0, [10.5], ("failure", TIMEOUT_S)),
    ],
    ids=["latency twice and its bytes once", "two share a link", "lost", "late"],
)
def test_a_call_is_answered_or_fails_in_time(
    nbytes: list[int], loss_share: float, handled: list[float], end: tuple[str, float]
) -> None:
    world, network = links(loss_share=loss_share)
    *_, last = [call(world, network, size) for size in nbytes]
    run(world)
    assert last == (handled, [end])


def test_some_lost_calls_were_handled_and_no_call_ends_twice() -> None:
    world, network = links(loss_share=0.3)
    calls = [call(world, network) for _ in range(100)]
    run(world)
    assert all(len(ends) == 1 for _, ends in calls)
    assert {(len(handled), ends[0][0]) for handled, ends in calls} == {(0, "failure"), (1, "failure"), (1, "answer")}


def test_a_partition_loses_what_is_under_way_until_it_heals() -> None:
    world, network = links()
    under_way, _ = call(world, network)
    heal = network.cut(["b"])
    during, _ = call(world, network)
    world.schedule(1.0, "heal", heal)
    run(world)
    after, ends = call(world, network)
    run(world)
    assert (under_way, during, len(after), ends[0][0]) == ([], [], 1, "answer")


@dataclass(frozen=True, slots=True)
class Block:
    nbytes: int


class Firehose:
    """Always has something for everybody, until `left` is none."""

    def __init__(
        self, shape: NetworkShape, *, up: float = 1000.0, down: dict[NodeId, float], left: int = 10**6
    ) -> None:
        self.world = World(Random(3))
        self.network: BulkNetwork[Block] = BulkNetwork(self.world, shape, self)
        self.network.add(S, up_bytes_per_s=up, down_bytes_per_s=up)
        self.left = left
        self.pulled: dict[NodeId, int] = defaultdict(int)
        self.arrived: dict[NodeId, list[float]] = defaultdict(list)
        for node, rate in down.items():
            self.network.add(node, up_bytes_per_s=1000.0, down_bytes_per_s=rate)
            self.network.connect(S, node)
            self.network.kick(S, node)

    def pull(self, source: NodeId, target: NodeId) -> Block | None:
        if source != S or not self.left:
            return None
        self.left -= 1
        self.pulled[target] += 1
        return Block(100)

    def taken(self, source: NodeId, target: NodeId, frame: Block) -> None:
        pass

    def deliver(self, source: NodeId, target: NodeId, frame: Block) -> None:
        self.arrived[target].append(self.world.now)

    def run_for(self, seconds: float) -> Firehose:
        end = self.world.now + seconds
        self.world.schedule(seconds, "end", lambda: None)
        self.world.run_until(lambda: self.world.now >= end)
        return self


def test_a_slow_receiver_is_felt_by_its_sender_and_leaves_the_uplink_to_others() -> None:
    hose = Firehose(NetworkShape(), down={A: 100.0, B: 1000.0}).run_for(20.0)
    assert len(hose.arrived[A]) == pytest.approx(20, abs=1)
    assert len(hose.arrived[B]) == pytest.approx(180, abs=4)
    assert hose.pulled[A] - len(hose.arrived[A]) <= 3
    assert not hose.network.over_window


def test_a_long_path_is_kept_full() -> None:
    hose = Firehose(NetworkShape(latency_s=1.0), down={A: 1000.0}).run_for(30.0)
    assert len(hose.arrived[A]) == pytest.approx(290, abs=2)


def test_loss_costs_its_share_and_a_round_trip_and_keeps_the_order() -> None:
    hose = Firehose(NetworkShape(latency_s=0.2, loss_share=0.2), up=1e9, down={A: 1e9}, left=200).run_for(2000.0)
    arrived = hose.arrived[A]
    assert len(arrived) == 200
    assert arrived == sorted(arrived)
    assert hose.network.sent_bytes(S) > 200 * 100
    assert max(later - one for one, later in pairwise(arrived)) >= 2 * 0.2 - 1e-3


def test_the_dead_send_and_take_nothing_and_what_is_on_the_way_is_lost_with_its_connection() -> None:
    hose = Firehose(NetworkShape(latency_s=1.0), down={A: 1000.0, B: 1000.0}).run_for(2.0)
    hose.network.kill(A)
    taken = len(hose.arrived[A])
    hose.run_for(5.0)
    assert 0 < taken == len(hose.arrived[A])
    hose.network.disconnect(S, B)
    before = len(hose.arrived[B])
    hose.run_for(5.0)
    assert len(hose.arrived[B]) == before < hose.pulled[B]
    hose.network.connect(S, B)
    hose.network.kill(S)
    pulled = hose.pulled[B]
    hose.network.kick(S, B)
    hose.run_for(5.0)
    assert hose.pulled[B] == pulled
