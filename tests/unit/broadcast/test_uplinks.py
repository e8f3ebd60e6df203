"""What the learner believes of uplinks: what a probe showed, whatever anybody says."""

from __future__ import annotations

from collections import Counter

import pytest

from swarm.broadcast.announcing import forwarders_of
from swarm.broadcast.forest.planner import STRIPES, PeerProfile, Planning, forest_of, slots_of
from swarm.broadcast.uplinks import (
    AGAIN_S,
    AT_ONCE,
    FILLER_BYTES,
    LEAST_S,
    PROBE_BYTES,
    PROBE_S,
    SILENT_S,
    Uplinks,
)
from swarm.types import NodeId

FAST, SLOW, LIAR = NodeId("fast"), NodeId("slow"), NodeId("liar")


def probed(rates: dict[NodeId, float], *, burst_bytes: int = 0) -> Uplinks:
    """Each of these nodes was asked, and sent at its rate, after a burst that came at once."""
    uplinks, now = Uplinks(), 0.0
    while asked := uplinks.due(rates, idle=True, now=now):
        for node in asked:
            answer(uplinks, node, rates[node], now=now, burst_bytes=burst_bytes)
        now += PROBE_S + LEAST_S + 0.1
    return uplinks


def answer(uplinks: Uplinks, node: NodeId, rate: float, *, now: float, burst_bytes: int = 0) -> None:
    sent, at = 0, now
    while sent < PROBE_BYTES and at <= now + PROBE_S:
        uplinks.came(node, FILLER_BYTES, now=at)
        sent += FILLER_BYTES
        at += FILLER_BYTES / rate if sent > burst_bytes else 0.0


@pytest.mark.parametrize("mbit", [0.4, 4.0, 40.0])
def test_a_burst_that_a_shaped_line_lets_through_does_not_make_it_faster(mbit: float) -> None:
    rate = mbit * 1e6 / 8
    assert probed({FAST: rate}, burst_bytes=32_768).of([FAST])[FAST] == pytest.approx(rate, rel=0.01)


def test_few_nodes_are_probed_at_once_and_a_silent_one_is_not_waited_for() -> None:
    uplinks, nodes = Uplinks(), [NodeId(f"node{number}") for number in range(2 * AT_ONCE)]
    assert uplinks.due(nodes, idle=True, now=0.0) == nodes[:AT_ONCE]
    assert uplinks.due(nodes, idle=True, now=SILENT_S - 1) == []
    assert uplinks.due(nodes, idle=True, now=SILENT_S + 1) == nodes[AT_ONCE:]
    assert set(uplinks.of(nodes).values()) == {0.0}, "nobody's uplink is known"
    assert uplinks.due(nodes, idle=True, now=10 * AGAIN_S) == nodes[:AT_ONCE], "once more: they may have been busy"


def test_an_unknown_uplink_is_the_median_and_none_counts_for_more_than_a_few_medians() -> None:
    uplinks = probed({FAST: 1e9, NodeId("other"): 4e6, SLOW: 1e6})
    believed = uplinks.of([FAST, SLOW, LIAR])
    assert believed == {FAST: pytest.approx(32e6, rel=0.01), SLOW: pytest.approx(1e6), LIAR: pytest.approx(4e6)}


def test_what_a_busy_machine_takes_up_late_does_not_make_a_line_faster() -> None:
    """For half a second it looks at nothing, and then finds all that came."""
    uplinks, rate = Uplinks(), 50_000.0
    uplinks.due([SLOW], idle=True, now=0.0)
    for number in range(int(PROBE_S * rate / FILLER_BYTES)):
        came_at = number * FILLER_BYTES / rate
        uplinks.came(SLOW, FILLER_BYTES, now=max(2.0, came_at) if came_at > 1.5 else came_at)
    uplinks.due([SLOW], idle=True, now=PROBE_S + 2 * LEAST_S)
    assert uplinks.of([SLOW])[SLOW] == pytest.approx(rate, rel=0.02)


def test_what_a_node_sends_while_it_passes_on_a_version_does_not_count() -> None:
    uplinks = Uplinks()
    assert uplinks.due([FAST], idle=False, now=0.0) == []
    assert uplinks.due([FAST], idle=True, now=1.0) == [FAST]
    answer(uplinks, FAST, 1e5, now=1.0)
    assert uplinks.due([FAST], idle=False, now=2.0) == []
    assert uplinks.due([FAST], idle=True, now=60.0) == [FAST]
    answer(uplinks, FAST, 1e6, now=60.0)
    uplinks.due([FAST], idle=True, now=70.0)
    assert uplinks.of([FAST])[FAST] == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("moments", [[0.1] * 4, [0.1, 0.1, 0.1, 0.5], [0.1, 0.2, 0.3, 0.4]])
def test_what_comes_from_a_machine_that_stood_still_tells_nothing(moments: list[float]) -> None:
    uplinks = Uplinks()
    uplinks.due([FAST], idle=True, now=0.0)
    for moment in moments:
        uplinks.came(FAST, FILLER_BYTES, now=moment)
    assert uplinks.due([FAST], idle=True, now=AGAIN_S - 1) == []
    assert uplinks.of([FAST]) == {FAST: 0.0}
    assert uplinks.due([FAST], idle=True, now=AGAIN_S) == [FAST]


def test_a_node_is_probed_twice_and_once_more_if_it_fell_behind_while_nothing_is_sent() -> None:
    uplinks = probed({FAST: 2e6})
    assert uplinks.due([FAST], idle=True, now=AGAIN_S) == [FAST]
    answer(uplinks, FAST, 4e6, now=AGAIN_S)
    assert uplinks.due([FAST], idle=True, now=9 * AGAIN_S) == []
    assert uplinks.of([FAST])[FAST] == pytest.approx(4e6, rel=0.01), "the newest"
    uplinks.lower({FAST: 2e6, LIAR: 1.0}, now=9 * AGAIN_S)
    assert uplinks.of([FAST])[FAST] == 2e6
    assert uplinks.due([FAST], idle=True, now=9.9 * AGAIN_S) == []
    assert uplinks.due([FAST], idle=False, now=11 * AGAIN_S) == []
    assert uplinks.due([FAST], idle=True, now=11 * AGAIN_S) == [FAST]
    answer(uplinks, FAST, 3e6, now=11 * AGAIN_S)
    assert uplinks.due([FAST], idle=True, now=19 * AGAIN_S) == []
    assert uplinks.of([FAST])[FAST] == pytest.approx(3e6, rel=0.01)


def test_more_filler_than_was_asked_for_is_refused_and_a_node_that_left_is_forgotten() -> None:
    uplinks = Uplinks()
    assert not uplinks.came(LIAR, 1, now=0.0)
    uplinks.due([FAST], idle=True, now=0.0)
    assert all(uplinks.came(FAST, FILLER_BYTES, now=0.1) for _ in range(PROBE_BYTES // FILLER_BYTES))
    assert not uplinks.came(FAST, FILLER_BYTES, now=0.1)
    uplinks.due([], idle=True, now=1.0)
    assert uplinks.due([FAST], idle=True, now=2.0) == [FAST]
    assert uplinks.came(FAST, FILLER_BYTES, now=3.0)


@pytest.mark.parametrize("honest", [1, 40, 200])
def test_a_node_that_shows_nothing_has_no_more_than_a_median_nodes_share_of_a_forest_and_a_table(honest: int) -> None:
    rates = {NodeId(f"{i:032x}"): 1e6 * (1 + i % 9) for i in range(honest)}
    believed = probed(rates).of([LIAR, *rates])
    profiles = [PeerProfile(node=node, public=True, uplink_bytes_per_s=rate) for node, rate in believed.items()]
    learner = PeerProfile(node=NodeId("learner"), public=True, uplink_bytes_per_s=5e6)
    slots = slots_of(forest_of(learner, profiles, STRIPES))
    assert slots.get(LIAR, 0) <= max(slots.get(node, 0) for node in rates) <= 2 * STRIPES
    assert Counter(forwarders_of(32, believed))[LIAR] <= max(2, 32 // len(believed))


def test_trees_are_planned_anew_where_that_is_clearly_faster_and_else_stay() -> None:
    nodes = [NodeId(f"node{number}") for number in range(40)]
    planning = Planning(NodeId("learner"))

    def trees(fast: float) -> object:
        rates = {node: fast if number % 2 else 1e6 for number, node in enumerate(nodes)}
        peers = {n: PeerProfile(node=n, public=True, uplink_bytes_per_s=rate) for n, rate in rates.items()}
        return planning.begin(peers, 2e6, 10**8, 10**6, now=0.0).trees

    first = trees(1e6)
    assert trees(1.01e6) is first
    second = trees(4e6)
    assert second != first
    assert trees(4e6) is second
