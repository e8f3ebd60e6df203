"""Plans for any set of peers: trees that span, without loops, without links between leaves, within their degrees."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.broadcast.forest.planner import (
    LONGEST_HOLD_S,
    MAX_CHUNKS,
    MESH_PEERS,
    STRIPE_DEGREE,
    STRIPES,
    PeerProfile,
    VersionPlan,
    plan_of,
    repaired,
    slots_of,
)
from swarm.types import NodeId
from tests.simulator.broadcast.schemes import SCHEMES, bound_bytes_per_s, planner_named

MBIT = 1e6 / 8
TREES = tuple(scheme for scheme in SCHEMES if scheme != "mesh")

uplinks = st.one_of(st.just(0.0), st.floats(1.0, 1e11), st.floats(5 * MBIT, 200 * MBIT))
shapes = st.tuples(st.booleans(), uplinks)


def peers_of(drawn: list[tuple[bool, float]], *, first: int = 0) -> list[PeerProfile]:
    return [
        PeerProfile(node=NodeId(f"p{number}"), public=public, uplink_bytes_per_s=uplink)
        for number, (public, uplink) in enumerate(drawn, first)
    ]


def learner_of(uplink: float) -> PeerProfile:
    return PeerProfile(node=NodeId("learner"), public=True, uplink_bytes_per_s=uplink)


def log_normal(count: int, leaf_share: float, seed: int) -> list[PeerProfile]:
    draw = Random(seed)
    return peers_of([(draw.random() >= leaf_share, draw_uplink(draw)) for _ in range(count)])


def draw_uplink(draw: Random) -> float:
    return MBIT * min(200.0, max(5.0, draw.lognormvariate(3.4, 0.9)))


def check_trees(plan: VersionPlan) -> None:
    """Every peer in every tree once, the learner above all, no link between leaves."""
    for tree in plan.trees:
        assert set(tree) == set(plan.peers)
        depth = {plan.learner.node: 0}
        for node in tree:
            way: list[NodeId] = []
            while node not in depth:
                assert node not in way, "a peer is its own ancestor"
                way.append(node)
                node = tree[node]
            for below in reversed(way):
                depth[below] = depth[tree[below]] + 1
        for child, parent in tree.items():
            assert parent == plan.learner.node or plan.peers[parent].public or plan.peers[child].public


@given(st.lists(shapes, max_size=40), uplinks, st.sampled_from(TREES))
def test_any_set_of_peers_has_valid_trees(drawn: list[tuple[bool, float]], learner: float, scheme: str) -> None:
    plan = planner_named(scheme)(learner_of(learner), peers_of(drawn), 1 << 26)
    check_trees(plan)
    assert plan.scheme == scheme
    for node in plan.peers:
        routes = plan.routes_of(node)
        assert len(routes.parents) == len(routes.children) == len(plan.trees)


@given(st.lists(shapes, min_size=1, max_size=60), uplinks)
def test_degrees_are_in_bounds(drawn: list[tuple[bool, float]], learner: float) -> None:
    """No node is loaded by more than one slot above any other that could have taken it."""
    plan = plan_of(learner_of(learner), peers_of(drawn), encoded_bytes=1 << 26, scheme="forest")
    slots = slots_of(plan.trees)
    publics = [plan.learner, *(peer for peer in plan.peers.values() if peer.public)]
    spare = min(
        (slots.get(peer.node, 0) + 1) / peer.uplink_bytes_per_s
        for peer in publics
        if peer is plan.learner or slots.get(peer.node, 0) < STRIPES * (len(drawn) - 1)
    )
    for peer in plan.peers.values():
        assert slots.get(peer.node, 0) / peer.uplink_bytes_per_s <= spare * (1 + 1e-9)


@pytest.mark.parametrize("leaf_share", [0.0, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("count", [33, 100, 1000])
def test_a_forest_plans_near_the_bound(count: int, leaf_share: float) -> None:
    peers = log_normal(count, leaf_share, seed=count)
    plan = plan_of(learner_of(100 * MBIT), peers, encoded_bytes=1 << 28)
    check_trees(plan)
    assert plan.scheme == "forest"
    assert plan.rate_bytes_per_s >= 0.85 * bound_bytes_per_s(100 * MBIT, peers)
    widest = max(len(below) for peer in plan.peers for below in plan.routes_of(peer).children)
    assert widest <= 2 * STRIPE_DEGREE


def test_most_peers_are_interior_in_few_stripes() -> None:
    plan = plan_of(learner_of(100 * MBIT), log_normal(300, 0.0, seed=1), encoded_bytes=1 << 28)
    interior = [sum(map(bool, plan.routes_of(node).children)) for node in plan.peers]
    assert sum(count <= 2 for count in interior) >= 0.6 * len(interior)


def test_without_publics_the_forest_is_a_star() -> None:
    plan = plan_of(learner_of(MBIT), log_normal(40, 1.0, seed=1), encoded_bytes=1 << 26)
    assert all(parent == plan.learner.node for tree in plan.trees for parent in tree.values())


@given(
    st.lists(shapes, max_size=40),
    st.lists(shapes, max_size=5),
    st.sets(st.integers(0, 39)),
    st.sampled_from(TREES),
)
@settings(deadline=None)
def test_a_repair_is_valid_and_changes_little(
    drawn: list[tuple[bool, float]],
    new: list[tuple[bool, float]],
    gone: set[int],
    scheme: str,
) -> None:
    before = planner_named(scheme)(learner_of(50 * MBIT), peers_of(drawn), 1 << 26)
    dead = {NodeId(f"p{number}") for number in gone}
    joined = peers_of(new, first=len(drawn))
    after = repaired(before, gone=sorted(dead), joined=joined)
    check_trees(after)
    assert set(after.peers) == (set(before.peers) - dead) | {peer.node for peer in joined}
    for old, tree in zip(before.trees, after.trees, strict=True):
        for child, parent in tree.items():
            if child in old and old[child] not in dead:
                assert parent == old[child]


def test_many_deaths_leave_the_rest_evenly_loaded() -> None:
    peers = log_normal(300, 0.7, seed=3)
    plan = plan_of(learner_of(100 * MBIT), peers, encoded_bytes=1 << 28)
    gone = [peer.node for peer in peers[::20]]
    after = repaired(plan, gone=gone)
    left = [peer for peer in peers if peer.node not in gone]
    assert after.rate_bytes_per_s >= 0.8 * bound_bytes_per_s(100 * MBIT, left)


@given(st.integers(1, 1 << 42), st.integers(1, 200), st.sampled_from(SCHEMES))
@settings(max_examples=60, deadline=None)
def test_chunks_are_a_power_of_two_and_not_too_many(encoded_bytes: int, count: int, scheme: str) -> None:
    plan = planner_named(scheme)(learner_of(MBIT), log_normal(count, 0.5, 1), encoded_bytes)
    assert plan.chunk_bytes in {1 << shift for shift in range(14, 23)}
    assert encoded_bytes <= plan.chunk_bytes * MAX_CHUNKS or plan.chunk_bytes == 1 << 22


def test_the_mesh_is_for_few() -> None:
    few, many = log_normal(MESH_PEERS, 0.5, 1), log_normal(MESH_PEERS + 1, 0.5, 1)
    assert plan_of(learner_of(MBIT), few, encoded_bytes=1 << 26).scheme == "mesh"
    assert plan_of(learner_of(MBIT), many, encoded_bytes=1 << 26).scheme == "forest"


@pytest.mark.parametrize(
    ("count", "slow_mbit", "fast_mbit", "scheme"),
    [
        (16, 2.0, 2.0, "forest"),
        (8, 2.0, 2.0, "mesh"),
        (32, 8.0, 8.0, "mesh"),
        (16, 4 / 9 * 4, 32 / 9 * 4, "forest"),
        (16, 0.0, 0.0, "mesh"),  # Nobody was probed yet: a typical home line is assumed
    ],
)
def test_slow_lines_have_trees_where_a_mesh_would_take_long_for_each_chunk(
    count: int, slow_mbit: float, fast_mbit: float, scheme: str
) -> None:
    peers = peers_of([(True, MBIT * (fast_mbit if number % 2 else slow_mbit)) for number in range(count)])
    assert plan_of(learner_of(4 * MBIT), peers, encoded_bytes=16 << 20).scheme == scheme


@pytest.mark.parametrize("encoded_mib", [64, 256, 1024])
def test_a_chunk_of_a_long_transfer_holds_its_forwarder_for_a_moment_only(encoded_mib: int) -> None:
    plan = plan_of(learner_of(50 * MBIT), peers_of([(True, 50 * MBIT)] * 8), encoded_bytes=encoded_mib << 20)
    assert plan.scheme == "mesh"
    assert 7 * plan.chunk_bytes <= LONGEST_HOLD_S * 50 * MBIT


def test_the_bound_has_four_terms() -> None:
    publics = [(True, 10.0), (True, 20.0)]
    leaves = [(False, 30.0), (False, 40.0)]
    assert bound_bytes_per_s(5.0, peers_of(publics)) == 5.0
    assert bound_bytes_per_s(500.0, peers_of(publics), slowest_downlink=7.0) == 7.0
    assert bound_bytes_per_s(50.0, peers_of(publics)) == (50.0 + 30.0) / 2
    assert bound_bytes_per_s(50.0, peers_of([(True, 1.0), *leaves, *leaves])) == (50.0 + 1.0) / 4
