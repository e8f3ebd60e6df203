"""The courier of static trees, call by call: who is sent what, in which order, and what is pulled when trees fail.
Children of parents that cannot keep up: who complains, whom the learner believes, where they go."""

from __future__ import annotations

from random import Random

from msgspec import structs

from swarm.broadcast.forest.courier import (
    ASKED_OF_HELPER,
    FIRST_ASKS,
    HELPED_AT_ONCE,
    IN_VAIN,
    LEAD_ROUNDS,
    TreeCourier,
)
from swarm.broadcast.forest.planner import ECHO_S, LASTING_S, PeerProfile, Relief, VersionPlan, plan_of, relieved
from swarm.broadcast.forest.pulls import ASK_S, BEHIND_S, KEEP_ROUNDS, ORPHAN_S, SILENT_INTERVALS, SILENT_S, TICK_S
from swarm.broadcast.notes import (
    MAX_INDICES,
    NO_NODE,
    Behind,
    Complete,
    Have,
    Note,
    NoteKind,
    Routing,
    Send,
    Want,
    has_bit,
)
from swarm.types import NodeId
from tests.simulator.broadcast.checkers import within_caps

LEARNER, PARENT, A, B, C = (NodeId(name) for name in ("learner", "parent", "a", "b", "c"))


def routes(parents: list[NodeId | None], children: list[list[NodeId]]) -> Routing:
    return Routing(
        parents=tuple(parent or NO_NODE for parent in parents),
        children=tuple(tuple(of) for of in children),
        chunks_per_s=0.0,
    )


def courier(count: int, plan: Routing, *joined: NodeId, held: bytes = b"") -> TreeCourier:
    core = TreeCourier(count=count, learner=LEARNER, routes=plan, held=held, random=Random(1))
    for peer in joined:
        core.join(peer, leaf=False, now=0.0)
    return core


def source(count: int, children: list[list[NodeId]], *joined: NodeId) -> TreeCourier:
    """One that holds everything; its children are joined, or who is named."""
    held = ((1 << count) - 1).to_bytes(-(-count // 8), "little")
    plan = routes([None] * len(children), children)
    return courier(count, plan, *(joined or [peer for of in children for peer in of]), held=held)


def came(core: TreeCourier, sender: NodeId, *indices: int, now: float = 0.0) -> None:
    for index in indices:
        core.arrived(sender, index, NoteKind.FRESH, None, now=now)


def drained(core: TreeCourier, peer: NodeId, now: float = 0.0, most: int = 1000) -> list[Note | Send]:
    """What the link to `peer` is given until it has nothing more to carry."""
    found: list[Note | Send] = []
    while len(found) < most and (frame := core.next_for(peer, now=now)) is not None:
        found.append(frame)
        if isinstance(frame, Send):
            core.sent(peer, frame, now=now)
    return found


def indices(frames: list[Note | Send]) -> list[int]:
    return [frame.index for frame in frames if isinstance(frame, Send)]


def ticked(core: TreeCourier, start: float, end: float) -> float:
    """Time passes."""
    now = start
    while now < end:
        now += TICK_S
        if (deadline := core.deadline()) is not None and deadline <= now:
            core.tick(now=now)
    return now


def test_a_source_sends_each_stripe_to_its_children_in_order() -> None:
    core = source(6, [[A], [B]])
    assert core.ready() == [A, B]
    assert indices(drained(core, A)) == [0, 2, 4]
    assert indices(drained(core, B)) == [1, 3, 5]
    assert core.ready() == []


def test_a_chunk_goes_on_to_the_children_of_its_stripe_and_no_others() -> None:
    core = courier(6, routes([PARENT, PARENT], [[A], [B]]), PARENT, A, B)
    core.ready()
    came(core, PARENT, 3, now=1.0)
    assert core.ready() == [B]
    assert drained(core, B) == [Send(3, NoteKind.FRESH)]
    assert drained(core, A) == drained(core, PARENT) == []
    came(core, PARENT, 3, now=1.0)
    assert drained(core, B) == []


def test_links_stay_abreast_while_the_others_move() -> None:
    core = source(100, [[A], [B], [C]])
    ahead = indices(drained(core, A))
    assert max(ahead) == LEAD_ROUNDS * 3
    core.ready()
    drained(core, B)
    drained(core, C)
    assert indices(drained(core, A))


def test_where_half_of_the_links_stand_still_the_others_walk_on() -> None:
    core = source(64, [[A], [B]])
    got = indices(drained(core, A))
    now = 0.0
    while len(got) < 32 and now < 30.0:
        now = ticked(core, now, now + TICK_S)
        got += indices(drained(core, A, now=now))
    assert got == list(range(0, 64, 2))


def test_who_comes_back_says_what_it_holds_and_is_whole_when_it_is() -> None:
    core = courier(4, routes([PARENT], [[]]), PARENT, held=b"\x03")
    assert drained(core, PARENT) == [Have(bitmap=b"\x03")]
    came(core, PARENT, 2, 3)
    assert core.complete
    assert drained(core, PARENT) == [Complete()]
    core.tick(now=10.0)
    assert core.deadline() is None


def test_a_child_of_a_new_plan_is_sent_what_it_does_not_say_to_hold() -> None:
    core = source(6, [[]], A)
    core.set_routes(routes([None], [[A]]), now=10.0)
    drained(core, A, most=2)
    core.heard(A, Have(bitmap=b"\x07"), now=10.1)
    assert indices(drained(core, A)) == [3, 4, 5]


def test_a_new_parent_is_told_what_is_held_and_an_old_one_sends_no_more() -> None:
    child = courier(6, routes([PARENT], [[A]]), PARENT, A, B)
    came(child, PARENT, 0)
    child.set_routes(routes([B], [[]]), now=1.0)
    assert drained(child, B) == [Have(bitmap=b"\x01")]
    assert drained(child, A) == []


def test_a_want_is_served_once_with_what_is_held_and_answered_with_what_that_is() -> None:
    core = courier(8, routes([PARENT], [[]]), PARENT, A)
    came(core, PARENT, 1)
    core.heard(A, Want(indices=(1, 5, 1)), now=0.0)
    assert core.ready() == [A]
    assert drained(core, A) == [Have(bitmap=b"\x02"), Send(1, NoteKind.COPY)]
    core.heard(A, Want(indices=(5,)), now=0.5)
    assert drained(core, A) == []


def test_a_request_that_has_waited_for_longer_than_who_asked_is_dropped() -> None:
    core = courier(8, routes([PARENT], [[]]), PARENT, A)
    came(core, PARENT, 1, 2)
    core.heard(A, Want(indices=(1,)), now=0.0)
    core.heard(A, Want(indices=(2,)), now=1.0)
    assert indices(drained(core, A, now=ASK_S)) == [2]


def wants(core: TreeCourier, peers: list[NodeId], now: float) -> dict[NodeId, tuple[int, ...]]:
    frames = {peer: drained(core, peer, now=now) for peer in peers}
    return {peer: note.indices for peer, of in frames.items() for note in of if isinstance(note, Want)}


def test_an_orphan_pulls_its_stripe_as_far_as_the_others_are() -> None:
    core = courier(20, routes([PARENT, A], [[], [C]]), PARENT, A, B, C, LEARNER)
    came(core, PARENT, *range(0, 8, 2), now=0.5)
    core.heard(B, Have(bitmap=b"\xff\xff\xff"), now=0.5)
    core.leave(A, now=1.0)
    now = ticked(core, 1.0, 1.0 + ORPHAN_S + TICK_S)
    assert wants(core, [PARENT, B, C, LEARNER], now) == {B: (1, 3, 5)}
    core.arrived(B, 3, NoteKind.COPY, None, now=now)
    assert drained(core, C, now=now) == [Send(3, NoteKind.FRESH)]


def test_a_chunk_that_never_came_is_asked_for_at_the_end_and_at_last_of_the_learner() -> None:
    core = courier(60, routes([PARENT, A], [[], []]), PARENT, A, LEARNER)
    now = 0.0
    asked: list[tuple[NodeId, tuple[int, ...]]] = []
    for index in range(60 + round((SILENT_S + 4 * ASK_S) / TICK_S)):
        now = ticked(core, now, now + TICK_S)
        if index != 4 and index < 60:
            core.arrived(PARENT if index % 2 == 0 else A, index, NoteKind.FRESH, None, now=now)
        asked += wants(core, [PARENT, A, LEARNER], now).items()
    assert {of for _, of in asked} == {(4,)}
    assert asked[-1][0] == LEARNER
    assert asked[0][0] in (PARENT, A)


def test_silence_is_measured_by_the_planned_pace_not_by_what_a_starved_node_got() -> None:
    plan = structs.replace(routes([PARENT], [[]]), chunks_per_s=4.0)
    core = courier(8, plan, PARENT, LEARNER)
    came(core, PARENT, 0)
    came(core, PARENT, 1, now=60.0)
    now = ticked(core, 60.0, 60.0 + SILENT_S)
    assert wants(core, [PARENT, LEARNER], now) == {}
    now = ticked(core, now, now + SILENT_INTERVALS / 4 + TICK_S)
    assert wants(core, [PARENT, LEARNER], now)


def test_a_parent_whose_link_is_still_to_come_is_waited_for() -> None:
    core = courier(20, routes([PARENT, A], [[], []]), PARENT, LEARNER)
    came(core, PARENT, *range(0, 20, 2), now=0.5)
    now = ticked(core, 0.5, SILENT_S - 2 * TICK_S)
    assert wants(core, [PARENT, LEARNER], now) == {}
    core.join(A, leaf=False, now=now)
    now = ticked(core, now, now + SILENT_S - 2 * TICK_S)
    assert wants(core, [PARENT, A, LEARNER], now) == {}


def test_what_is_pulled_for_a_parent_that_never_links_does_not_begin_its_patience_again() -> None:
    core = courier(100, routes([A], [[]]), LEARNER)
    now = ticked(core, 0.0, SILENT_S + TICK_S)
    (first,) = wants(core, [LEARNER], now).values()
    for index in first:
        core.arrived(LEARNER, index, NoteKind.COPY, None, now=now + TICK_S)
    now = ticked(core, now, now + 2 * TICK_S)
    (second,) = wants(core, [LEARNER], now).values()
    assert second[0] == first[-1] + 1


def test_nothing_that_a_peer_says_breaks_a_cap() -> None:
    core = courier(1000, routes([PARENT], [[A]]), PARENT, A)
    for number in range(100):
        first = number * MAX_INDICES
        core.heard(A, Want(indices=tuple(range(first, first + MAX_INDICES))), now=0.0)
        core.heard(A, Have(bitmap=bytes(1000)), now=0.0)
        core.arrived(A, number * 977, NoteKind.FORWARD, B, now=0.0)
        assert within_caps(core)
    core.heard(B, Complete(), now=0.0)
    core.leave(B, now=0.0)
    came(core, B, 0)
    assert core.next_for(B, now=0.0) is None


def test_what_lags_is_asked_of_who_offers_help_a_few_at_a_time_and_the_parent_is_told() -> None:
    core = courier(80, routes([PARENT, A], [[], [C]]), PARENT, A, B, C, LEARNER)
    came(core, PARENT, *range(0, 40, 2), now=0.5)
    came(core, A, 1, now=0.5)
    now = ticked(core, 0.5, 1.0)
    assert wants(core, [PARENT, A, B, C, LEARNER], now) == {}
    for peer in (A, B, LEARNER):
        core.heard(peer, Complete() if peer == LEARNER else Have(bitmap=b"\xff" * 10), now=now)
    ((helper, first),) = wants(core, [PARENT, A, B, C, LEARNER], now).items()
    assert helper == B
    assert len(first) == ASKED_OF_HELPER
    assert set(first) <= set(range(3 + 2 * KEEP_ROUNDS, 40, 2))
    core.arrived(B, first[0], NoteKind.COPY, None, now=now)
    assert drained(core, C, now=now) == [Send(first[0], NoteKind.FRESH)]
    assert [len(of) for of in wants(core, [A, B], now).values()] == [1]
    now = ticked(core, now, now + TICK_S)
    (told,) = [note for note in drained(core, A, now=now) if isinstance(note, Have)]
    assert has_bit(told.bitmap, first[0])


def test_each_copy_that_was_needed_allows_one_more_ask_of_helpers_and_one_in_vain_two_fewer() -> None:
    others = [NodeId(f"other {number}") for number in range(9)]

    def asked(*, needed: int, in_vain: int) -> int:
        """How many chunks are asked at once of nine who offer all."""
        core = courier(200, routes([PARENT, A], [[], []]), PARENT, A, *others)
        came(core, PARENT, *range(0, 180, 2), now=0.5)
        for index in range(1, 1 + 2 * needed, 2):
            core.arrived(B, index, NoteKind.COPY, None, now=0.5)
        came(core, PARENT, *range(0, 2 * in_vain, 2), now=0.5)
        for peer in others:
            core.heard(peer, Have(bitmap=b"\xff" * 25), now=0.5)
        now = ticked(core, 0.5, 1.0)
        return sum(len(of) for of in wants(core, others, now).values())

    assert asked(needed=0, in_vain=0) == FIRST_ASKS
    assert asked(needed=3, in_vain=0) == FIRST_ASKS + 3
    assert asked(needed=3, in_vain=2) == FIRST_ASKS + 3 - 2 * IN_VAIN
    assert asked(needed=0, in_vain=9) == 1
    assert asked(needed=50, in_vain=0) == len(others) * ASKED_OF_HELPER


def test_what_is_left_at_the_end_is_asked_of_who_has_it_however_little_it_is() -> None:
    core = courier(40, routes([PARENT, A], [[], []]), PARENT, A, B, LEARNER)
    came(core, PARENT, *range(0, 40, 2), now=0.5)
    came(core, A, *range(1, 38, 2), now=0.5)
    core.heard(B, Complete(), now=0.5)
    now = ticked(core, 0.5, 1.0)
    assert wants(core, [PARENT, A, B, LEARNER], now) == {B: (39,)}


def test_at_the_end_the_learner_is_asked_for_what_nobody_else_offers() -> None:
    core = courier(40, routes([PARENT, A], [[], []]), PARENT, A, LEARNER)
    core.heard(LEARNER, Complete(), now=0.5)
    came(core, PARENT, *range(0, 38, 2), now=0.5)
    now = ticked(core, 0.5, 1.0)
    assert wants(core, [PARENT, A, LEARNER], now) == {}
    came(core, PARENT, 38, now=now)
    now = ticked(core, now, now + TICK_S)
    ((asked, first),) = wants(core, [PARENT, A, LEARNER], now).items()
    assert (asked, len(first)) == (LEARNER, ASKED_OF_HELPER)
    core.join(B, leaf=False, now=now)
    core.heard(B, Complete(), now=now)
    core.arrived(LEARNER, first[0], NoteKind.COPY, None, now=now)
    now = ticked(core, now, now + TICK_S)
    assert set(wants(core, [PARENT, A, B, LEARNER], now)) == {B}


def test_of_what_is_asked_for_what_was_given_least_is_given_first() -> None:
    core = source(8, [[], []], A, B, C)
    core.heard(A, Want(indices=(5, 6)), now=0.0)
    assert indices(drained(core, A)) == [5, 6]
    core.heard(B, Want(indices=(5, 6, 7)), now=0.0)
    assert indices(drained(core, B, most=3)) == [7, 5]  # After Complete
    core.heard(C, Want(indices=(5, 6, 7)), now=0.0)
    assert indices(drained(core, C)) == [6, 7, 5]


def test_a_node_with_nothing_to_send_offers_help_and_one_with_a_queue_does_not() -> None:
    def offered(core: TreeCourier) -> int:
        now = ticked(core, 0.0, TICK_S)
        peers = [PARENT, LEARNER, *others]
        return sum(isinstance(note, Have) for peer in peers for note in drained(core, peer, now=now))

    others = [NodeId(f"other {number}") for number in range(9)]
    idle = courier(40, routes([PARENT], [[]]), PARENT, LEARNER, *others)
    came(idle, PARENT, 0)
    assert offered(idle) == HELPED_AT_ONCE
    busy = courier(40, routes([PARENT], [[A]]), PARENT, LEARNER, A, *others)
    came(busy, PARENT, 0)
    assert offered(busy) == 0


def test_of_a_backlog_each_child_is_given_what_no_other_was() -> None:
    core = courier(80, routes([PARENT], [[A, B]]), PARENT, A, B)
    came(core, PARENT, *range(40))
    given = {peer: indices(drained(core, peer, most=16)) for peer in (A, B)}
    assert not set(given[A]) & set(given[B])
    now = 0.0
    while len(given[A]) + len(given[B]) < 80 and now < 30.0:
        now = ticked(core, now, now + TICK_S)
        for peer in (A, B):
            given[peer] += indices(drained(core, peer, now=now))
    assert sorted(given[A]) == sorted(given[B]) == list(range(40))


def test_a_source_knows_what_its_children_hold() -> None:
    core = source(10, [[A], []])
    core.heard(A, Have(bitmap=bytes([0b11, 0])), now=0.0)
    assert (core.held_by(A), core.held_by(B)) == (2, 0)
    core.heard(A, Complete(), now=1.0)
    assert core.held_by(A) == 10


def equal_plan(peers: int) -> VersionPlan:
    learner, *others = (
        PeerProfile(node=NodeId(f"n{number}"), public=True, uplink_bytes_per_s=1e6) for number in range(peers + 1)
    )
    return plan_of(learner, others, encoded_bytes=1 << 26, scheme="forest")


def edge_below_a_peer(plan: VersionPlan) -> tuple[NodeId, NodeId, NodeId]:
    """A grandparent that is a peer, its child, and the child's child, in stripe 0."""
    tree = plan.trees[0]
    for node, parent in tree.items():
        if parent in plan.peers and tree[parent] in plan.peers:
            return tree[parent], parent, node
    raise AssertionError("no tree is that deep")


def test_a_child_gets_another_parent_that_is_not_late_and_its_old_one_is_believed_slower() -> None:
    plan = equal_plan(100)
    parent, child, _ = edge_below_a_peer(plan)
    after = relieved(plan, [(child, 0)])
    assert after.trees[0][child] not in (parent, child)
    assert after.peers[parent].uplink_bytes_per_s < plan.peers[parent].uplink_bytes_per_s
    changed = [(s, node) for s in range(16) for node, old in plan.trees[s].items() if after.trees[s][node] != old]
    assert changed == [(0, child)]


def test_only_the_first_in_a_tree_is_believed_and_only_if_it_goes_on() -> None:
    plan = equal_plan(100)
    _, child, below = edge_below_a_peer(plan)
    relief = Relief()
    assert relief.plan(plan, [(below, 0), (child, 0)], now=0.0) is plan
    assert relief.plan(plan, [(below, 0), (child, 0)], now=LASTING_S - 1) is plan
    after = relief.plan(plan, [(below, 0), (child, 0)], now=LASTING_S)
    assert after.trees[0][child] != plan.trees[0][child]
    assert after.trees[0][below] == child
    assert relief.plan(after, [(below, 0)], now=LASTING_S + ECHO_S / 2) is after
    assert relief.plan(after, [(below, 0)], now=LASTING_S + 1.2 * ECHO_S).trees[0][below] != child


def test_who_complained_a_while_ago_begins_anew() -> None:
    plan = equal_plan(100)
    _, child, _ = edge_below_a_peer(plan)
    relief = Relief()
    for moment in (0.0, LASTING_S + ECHO_S, 3 * ECHO_S + LASTING_S):
        assert relief.plan(plan, [(child, 0)], now=moment) is plan


def test_whom_the_learner_feeds_stays_and_strangers_are_not_heard() -> None:
    plan = equal_plan(100)
    fed = next(node for node, parent in plan.trees[3].items() if parent == plan.learner.node)
    assert relieved(plan, [(fed, 3), (NodeId("stranger"), 3)]).trees == plan.trees


def test_who_falls_behind_in_one_stripe_says_so_to_the_learner_who_keeps_it_for_the_planner() -> None:
    plan = structs.replace(routes([PARENT, A, A], [[], [], []]), chunks_per_s=30.0)
    core = courier(3000, plan, LEARNER, PARENT, A)
    now = 0.0
    said: list[Behind] = []
    while not said and now < 4 * BEHIND_S:
        now += TICK_S
        for step in range(10):
            at = round(now) * 30 + 3 * step
            for index in (at + 1, at + 2):
                core.arrived(A, index, NoteKind.FRESH, None, now=now)
        core.tick(now=now)
        said = [note for note in iter(lambda at=now: core.next_for(LEARNER, now=at), None) if isinstance(note, Behind)]  # type: ignore[misc]
    assert said == [Behind(stripes=(0,))]
    learner = source(3000, [[], [], []], A)
    learner.heard(A, Behind(stripes=(0, 7)), now=0.0)
    assert learner.complaints() == [(A, 0)]
    assert learner.complaints() == []
