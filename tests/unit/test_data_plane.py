"""What a receiver keeps of what others send it, whom it is linked with, and what the learner tells it."""

from __future__ import annotations

import pytest

from swarm.broadcast.forest import PeerProfile
from swarm.broadcast.manifest import TABLE_BYTES
from swarm.broadcast.planner import Routes, Scheme
from swarm.broadcast.planning import Planning, routing_of
from swarm.broadcast.roster import ADDRESSES, MAX_MEMBERS, Member, Roster, Routing
from swarm.broadcast.tables import EARLY_BYTES, PART_BYTES, EarlyParts, parts_of
from swarm.broadcast.transfers import CAPS, ROSTER_BYTES, ROUTES_BYTES, TABLE
from swarm.types import Address, NodeId
from swarm.wire import decode, encode
from tests.builders import ALICE, BOB, v


def test_a_part_of_the_largest_table_fits_into_its_frame() -> None:
    assert max(span.nbytes for span in parts_of(TABLE_BYTES)) == PART_BYTES == CAPS[TABLE]


def test_a_part_that_overtook_its_head_is_handed_out_once() -> None:
    early = EarlyParts()
    early.put(v(2), 1, b"b", BOB)
    early.put(v(1), 0, b"old", ALICE)
    early.put(v(3), 0, b"new", ALICE)
    assert early.take(v(2)) == [(1, b"b", BOB)]
    assert early.take(v(2)) == early.take(v(1)) == []
    assert early.take(v(3)) == [(0, b"new", ALICE)]


def test_a_flood_of_invented_parts_drives_out_itself_alone() -> None:
    early = EarlyParts()
    mine, yours = bytes(PART_BYTES), bytes(1)
    for index in range(4):
        early.put(v(7), index, yours, BOB)
    for number in range(3 * EARLY_BYTES // PART_BYTES):
        early.put(v(2**40 + number), 0, mine, ALICE)
        assert sum(early._nbytes.values()) <= EARLY_BYTES
    assert [index for index, _, _ in early.take(v(7))] == [0, 1, 2, 3]


def test_empty_parts_are_bounded_too() -> None:
    early = EarlyParts()
    for number in range(20_000):
        early.put(v(number), 0, b"", NodeId(f"node{number % 3}"))
    assert sum(map(len, early._sent.values())) <= EARLY_BYTES // 1024


def swarm_of(count: int, *, publics: int) -> tuple[dict[NodeId, PeerProfile], dict[NodeId, Member]]:
    """A swarm whose ids and addresses are as long as they may be."""
    addresses = tuple(Address(host="h" * 253, port=65_535, fingerprint=bytes(32)) for _ in range(ADDRESSES))
    nodes = [NodeId(f"{number:064x}") for number in range(count)]
    profiles = {
        node: PeerProfile(node=node, public=number < publics, uplink_bytes_per_s=1e9 if number < publics else 1e5)
        for number, node in enumerate(nodes)
    }
    return profiles, {
        node: Member(node=node, addresses=addresses if number < publics else ()) for number, node in enumerate(nodes)
    }


@pytest.mark.parametrize("scheme", [None, "mesh", "star"])
@pytest.mark.parametrize("planned", [False, True])
def test_no_roster_is_larger_than_receivers_take(scheme: Scheme | None, planned: bool) -> None:
    """One public with a fast uplink would be everybody's parent; whatever is left out is left out on both sides."""
    profiles, members = swarm_of(600, publics=1 if scheme is None else 600)
    planning = Planning(NodeId("learner"), scheme)
    if planned:
        planning.begin(profiles, 1e6, 10**8, 10**6)
    rosters = planning.rosters(members)
    for node, roster in rosters.items():
        assert decode(encode(roster), Roster, cap_bytes=ROSTER_BYTES) == roster
        assert members[node] in roster.members
        assert all(members[node] in rosters[NodeId(other.node)].members for other in roster.members)
        if planned and planning.plan is not None:
            routing = routing_of(planning.plan.routes_of(node))
            decode(encode(routing), Routing, cap_bytes=ROUTES_BYTES)


def test_a_large_swarm_without_a_plan_needs_no_links() -> None:
    _, members = swarm_of(600, publics=600)
    assert {len(roster.members) for roster in Planning(NodeId("learner"), None).rosters(members).values()} == {1}


def test_routes_of_a_node_with_as_many_children_as_can_be_fit_into_their_frame() -> None:
    children = tuple(NodeId(f"{number:064x}") for number in range(2 * MAX_MEMBERS))
    routes = Routes(parents=(None,) * 16, children=(children,) * 16)
    routing = decode(encode(routing_of(routes)), Routing, cap_bytes=ROUTES_BYTES)
    assert {len(row) for row in routing.children} == {MAX_MEMBERS}
