"""Links for bulk transfer: an uplink is shared, a slow receiver is felt, loss delays, the dead are silent."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from swarm.plan.simulate.world import World
from swarm.types import NodeId
from tests.simulator.broadcast.network import BulkNetwork, NetworkShape

S, A, B = NodeId("source"), NodeId("a"), NodeId("b")


@dataclass(frozen=True, slots=True)
class Block:
    nbytes: int


class Firehose:
    """Always has something for everybody, until `left` is none."""

    def __init__(self, shape: NetworkShape, *, down: dict[NodeId, float], left: int, seed: int = 0) -> None:
        self.world = World(Random(seed))
        self.network: BulkNetwork[Block] = BulkNetwork(self.world, shape, self)
        self.network.add(S, up_bytes_per_s=1000.0, down_bytes_per_s=1000.0)
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

    def run_for(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.world.schedule(seconds, "end", lambda: None)
        self.world.run_until(lambda: self.world.now >= end)


def test_an_uplink_is_shared_evenly_and_fully() -> None:
    hose = Firehose(NetworkShape(latency_s=0.5), down={A: 1000.0, B: 1000.0}, left=20)
    hose.run_for(10.0)
    assert len(hose.arrived[A]) == len(hose.arrived[B]) == 10
    assert max(hose.arrived[A] + hose.arrived[B]) == pytest.approx(20 * 0.1 + 0.5)
    assert hose.arrived[A][0] == pytest.approx(0.1 + 0.5)


def test_a_slow_receiver_is_felt_by_its_sender_and_leaves_the_uplink_to_others() -> None:
    hose = Firehose(NetworkShape(), down={A: 100.0, B: 1000.0}, left=10**6)
    hose.run_for(20.0)
    assert len(hose.arrived[A]) == pytest.approx(20, abs=1)
    assert len(hose.arrived[B]) == pytest.approx(180, abs=4)
    assert hose.pulled[A] - len(hose.arrived[A]) <= 3
    assert not hose.network.over_window


def test_a_long_path_is_kept_full() -> None:
    hose = Firehose(NetworkShape(latency_s=1.0), down={A: 1000.0}, left=10**6)
    hose.run_for(30.0)
    assert len(hose.arrived[A]) == pytest.approx(290, abs=2)


def test_loss_costs_its_share_and_a_round_trip_and_keeps_the_order() -> None:
    hose = Firehose(NetworkShape(latency_s=0.2, loss_share=0.2), down={A: 1e9}, left=200, seed=3)
    hose.run_for(2000.0)
    arrived = hose.arrived[A]
    assert len(arrived) == 200
    assert arrived == sorted(arrived)
    assert hose.network.sent_bytes(S) > 200 * 100
    gaps = [later - earlier for earlier, later in pairwise(arrived)]
    assert max(gaps) > 2 * 0.2


def test_the_dead_send_and_take_nothing() -> None:
    hose = Firehose(NetworkShape(), down={A: 1000.0, B: 1000.0}, left=10**6)
    hose.run_for(1.0)
    hose.network.kill(A)
    before = len(hose.arrived[A])
    hose.run_for(5.0)
    assert len(hose.arrived[A]) == before
    assert hose.pulled[A] <= before + 4
    hose.network.kill(S)
    hose.run_for(1.0)
    quiet = len(hose.arrived[B])
    hose.run_for(5.0)
    assert len(hose.arrived[B]) == quiet


def test_what_is_on_the_way_is_lost_with_its_connection() -> None:
    hose = Firehose(NetworkShape(latency_s=1.0), down={A: 1000.0}, left=10**6)
    hose.run_for(0.5)
    hose.network.disconnect(S, A)
    hose.run_for(5.0)
    assert hose.arrived[A] == []
