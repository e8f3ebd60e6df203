"""The world's clock and the network under it: order, delays, loss at either end of a call, partitions."""

from __future__ import annotations

from random import Random

from swarm.plan.simulate.world import World
from tests.simulator.network import LinkShape, Network, Reply

TIMEOUT_S = 5.0


def _network(seed: int = 0, *, loss_share: float = 0.0) -> tuple[World, Network]:
    world = World(Random(seed))
    shape = LinkShape(latency_s=0.5, jitter_s=0.0, loss_share=loss_share, bytes_per_s=100.0)
    return world, Network(world, shape)


def _call(world: World, network: Network, nbytes: int = 0) -> tuple[list[float], list[tuple[str, float]]]:
    """One call from a to b; when its handler ran, and how it ended."""
    handled: list[float] = []
    ends: list[tuple[str, float]] = []

    def handler(reply: Reply[str]) -> None:
        handled.append(world.now)
        reply("answer", 0)

    def answered(answer: str) -> None:
        ends.append((answer, world.now))

    def failed() -> None:
        ends.append(("failure", world.now))

    network.request("a", "b", nbytes, handler, answered, failed, timeout_s=TIMEOUT_S)
    return handled, ends


def _run(world: World) -> None:
    world.run_until(lambda: False)


def test_events_of_one_time_run_in_the_order_in_which_they_were_scheduled() -> None:
    world = World(Random(0))
    seen: list[str] = []
    for name in "bca":
        world.schedule(1.0, name, lambda name=name: seen.append(name))  # type: ignore[misc]
    _run(world)
    assert (seen, world.now, world.events) == (["b", "c", "a"], 1.0, 3)


def test_the_digest_is_of_the_times_and_the_labels() -> None:
    digests = []
    for label in ("x", "x", "y"):
        world = World(Random(0))
        world.schedule(1.0, label, lambda: None)
        _run(world)
        digests.append(world.trace_digest())
    assert digests[0] == digests[1] != digests[2]


def test_a_call_takes_the_latency_twice_and_its_bytes_once() -> None:
    world, network = _network()
    handled, ends = _call(world, network, nbytes=200)
    _run(world)
    assert (handled, ends) == ([2.5], [("answer", 3.0)])


def test_two_messages_share_the_rate_of_their_link() -> None:
    world, network = _network()
    _call(world, network, nbytes=100)
    handled, _ = _call(world, network, nbytes=100)
    _run(world)
    assert handled == [2.5]


def test_a_lost_message_is_a_failure_at_the_time_limit() -> None:
    world, network = _network(loss_share=1.0)
    handled, ends = _call(world, network)
    _run(world)
    assert (handled, ends) == ([], [("failure", TIMEOUT_S)])


def test_some_lost_calls_were_handled_and_no_call_ends_twice() -> None:
    world, network = _network(loss_share=0.3)
    calls = [_call(world, network) for _ in range(100)]
    _run(world)
    assert all(len(ends) == 1 for _, ends in calls)
    assert {(len(handled), ends[0][0]) for handled, ends in calls} == {(0, "failure"), (1, "failure"), (1, "answer")}


def test_an_answer_after_the_time_limit_is_not_heard() -> None:
    world, network = _network()
    handled, ends = _call(world, network, nbytes=1000)
    _run(world)
    assert (handled, ends) == ([10.5], [("failure", TIMEOUT_S)])


def test_a_partition_loses_what_is_under_way_until_it_heals() -> None:
    world, network = _network()
    under_way, _ = _call(world, network)
    heal = network.cut(["b"])
    during, _ = _call(world, network)
    world.schedule(1.0, "heal", heal)
    _run(world)
    after, ends = _call(world, network)
    _run(world)
    assert (under_way, during, len(after), ends[0][0]) == ([], [], 1, "answer")
    assert not network.partitioned
