"""A leaf and its homes, and a home and its leaves."""

from __future__ import annotations

from random import Random

from swarm.gossip.calls import MAX_FAILURES, Homes
from swarm.gossip.membership import Membership
from swarm.gossip.records import MAX_LEAVES, Exchange, Greet, LeafGone, Post, Wake
from swarm.gossip.table import LeafLeases
from swarm.types import NodeId
from tests.builders import v
from tests.swarmers import (
    DEAD_S,
    ELSEWHERE,
    LIFE_S,
    RULES,
    address,
    calls_in,
    core,
    deliver,
    head,
    introduce,
    key,
    reply,
    run_until,
    signed,
)

NODES = [NodeId(name) for name in "abcdefgh"]
LEASE_S = RULES.lease_rounds * RULES.round_s


def filled(*candidates: NodeId) -> Homes:
    one = Homes(RULES, Random(1))
    one.choose(candidates or NODES, last_resort=None, now=0.0)
    return one


def polls(one: Membership, *, now: float) -> list[Post]:
    """The polls that a leaf sends now."""
    return [call for call in calls_in(one.tick(now=now)) if call.message.hold_s]


def next_poll(leaf: Membership, *, now: float) -> Post:
    (poll,) = polls(leaf, now=now)
    return poll


def nodes_of(homes: Homes) -> list[NodeId]:
    return [home.node for home in homes.homes]


def leaf_with_home() -> tuple[Membership, Membership]:
    """A leaf, and the home whose first poll it had answered."""
    leaf, home = core(1, public=False), core(2)
    introduce(leaf, home.view.own)
    deliver(next_poll(leaf, now=0.0), leaf, home, now=0.0)
    return leaf, home


def test_every_slot_is_filled_with_another_home() -> None:
    one = filled()
    chosen = nodes_of(one)
    assert len(set(chosen)) == len(chosen) == RULES.homes
    one.choose(NODES, last_resort=None, now=1.0)
    assert nodes_of(one) == chosen, "a home that works is kept"
    assert len(one.due(now=0.0)) == 1, "the others are polled within the time of a call"
    assert len(one.due(now=RULES.round_s)) == RULES.homes


def test_an_answered_poll_is_followed_by_the_next_but_not_at_any_pace() -> None:
    one = filled(NODES[0])
    (home,) = one.homes
    one.answered(home, full=False, held_s=RULES.hold_s, now=10.0)
    assert home.next_at == 10.0
    one.answered(home, full=False, held_s=0.0, now=10.0)
    assert home.next_at >= 10.0 + RULES.hold_s / 10


def test_a_home_is_replaced_after_failures_in_a_row_and_by_another() -> None:
    one = filled(*NODES[: RULES.homes])
    home = one.homes[0]

    def fail() -> None:
        one.failed(home, took_s=0.0, patience=MAX_FAILURES, now=0.0)

    for _ in range(MAX_FAILURES - 1):
        fail()
    one.answered(home, full=False, held_s=0.0, now=0.0)
    waits: list[float] = []
    for _ in range(MAX_FAILURES):
        assert home in one.homes
        fail()
        waits.append(home.next_at)
    assert home not in one.homes
    assert waits == sorted(set(waits))
    one.choose(NODES[RULES.homes :], last_resort=None, now=0.0)
    assert len(one.homes) == RULES.homes
    assert home.node not in nodes_of(one)


def test_polls_renew_a_lease_and_silence_ends_it() -> None:
    leases = LeafLeases(RULES)
    for number, node in enumerate(NODES[:3]):
        assert leases.renew(node, network="", now=float(number))
    leases.renew(NODES[0], network="", now=LEASE_S)
    assert leases.expire(now=LEASE_S + 1.5, patience=1.0) == [LeafGone(node=NODES[1])]
    assert leases.expire(now=LEASE_S + 2.5, patience=2.0) == []
    assert leases.expire(now=LEASE_S + 2.5, patience=1.0) == [LeafGone(node=NODES[2])]
    assert list(leases.leaves) == [NODES[0]]


def test_the_newest_record_of_a_leaf_is_kept() -> None:
    leases = LeafLeases(RULES)
    leases.renew(key(1).node_id, network="", now=0.0)
    for sequence in (3, 5, 4):
        leases.tell(signed(1, sequence, reachability="leaf"))
    kept = leases.leaves[key(1).node_id].signed
    assert kept is not None
    assert kept.record.sequence == 5
    leases.tell(signed(2, reachability="leaf"))
    assert len(leases) == 1, "a record is no lease"


def test_a_home_that_may_lack_the_head_is_given_it() -> None:
    """gossip seed 923: after a partition and a learner that moved, leaves alone had the newest head, and kept it."""
    leaf, home = leaf_with_home()
    leaf.take_head(head(3), now=1.0)
    poll = next_poll(leaf, now=20.0)
    assert poll.message.head == head(3)
    deliver(poll, leaf, home, now=20.0)
    assert home.view.newest == v(3)
    assert next_poll(leaf, now=40.0).message.head == b"", "once"


def test_a_home_that_gave_the_head_or_has_it_is_not_given_it_again() -> None:
    leaf, home = leaf_with_home()
    home.take_head(head(3), now=1.0)
    first = next_poll(leaf, now=20.0)
    deliver(first, leaf, home, now=20.0)
    assert leaf.view.newest == v(3)
    home.take_head(head(4), now=21.0)
    held = next_poll(leaf, now=40.0)
    leaf.take_head(head(4), now=40.0)
    deliver(held, leaf, home, now=40.0)
    assert [poll.message.head for poll in (first, held, next_poll(leaf, now=60.0))] == [b"", b"", b""]


def test_a_home_that_was_lost_and_is_there_again_is_given_head_and_record_again() -> None:
    leaf, home = leaf_with_home()
    home.take_head(head(3), now=1.0)
    deliver(next_poll(leaf, now=20.0), leaf, home, now=20.0)
    leaf._reissue_at = 1e9
    for now in (40.0, 60.0):
        poll = next_poll(leaf, now=now)
        assert (poll.message.head, poll.message.records) == (b"", ()), "one lost packet"
        leaf.failed(poll, now=now)
        introduce(leaf, home.view.own, now=now)
    again = next_poll(leaf, now=80.0).message
    assert (again.head, again.records) == (head(3), (leaf.view.own.sealed,))


def test_a_first_poll_is_not_held_and_the_next_one_is() -> None:
    leaf = core(1, public=False)
    introduce(leaf, signed(2))
    first = next_poll(leaf, now=0.0)
    assert first.message.hold_s < RULES.round_s / 4
    leaf.answered(first, reply(), now=0.1)
    second = next_poll(leaf, now=min(leaf.homes.deadlines()))
    assert 0.7 * RULES.hold_s < second.message.hold_s <= RULES.longest_hold_s
    assert second.timeout_s > second.message.hold_s


def test_a_poll_is_held_until_there_is_a_newer_head() -> None:
    home = core(2)
    home.take_head(head(4), now=0.0)
    poll = Exchange(hold_s=RULES.hold_s, newest=v(4), asks=0)
    assert home.holds(poll)
    assert not home.holds(Exchange(asks=0)), "it is no poll"
    assert not home.holds(Exchange(hold_s=RULES.hold_s, newest=v(3), asks=0))
    assert Wake() in home.take_head(head(5), now=1.0)
    assert not home.holds(poll)
    assert home.answer(key(1).node_id, poll, now=1.0).head == head(5)


def test_a_poll_is_answered_when_the_learner_has_another_life_and_not_for_a_re_issue() -> None:
    home = core(2)
    introduce(home, signed(0))
    poll = Exchange(hold_s=RULES.hold_s, learner=signed(0).order, asks=0)
    assert home.holds(poll)
    introduce(home, signed(0, 7))
    assert home.holds(poll)
    moved = signed(0, 0, generation=2, addresses=[address(99)])
    assert Wake() in introduce(home, moved)
    assert not home.holds(poll)
    answer = home.answer(key(1).node_id, poll, now=0.0)
    assert answer.records == (moved.sealed,)
    leaf = core(1, public=False)
    introduce(leaf, signed(0), signed(2))
    leaf.answered(polls(leaf, now=0.0)[0], answer, now=0.1)
    learner = leaf.view.learner()
    assert learner is not None
    assert learner.record.addresses == (address(99),)


def test_a_dead_learner_is_no_reason_to_answer_a_poll() -> None:
    """Its last address is of no use; a leaf that cannot learn of it would ask again and again."""
    home = core(2)
    introduce(home, signed(0))
    run_until(home, DEAD_S + 10.0, now=0.0)
    assert home.view.table.dead
    poll = Exchange(hold_s=RULES.hold_s, asks=0)
    assert home.holds(poll)
    assert home.answer(key(1).node_id, poll, now=DEAD_S + 10.0).records == ()


def test_a_leaf_tells_a_home_its_record_once_and_again_when_it_is_lacking() -> None:
    leaf, home = leaf_with_home()
    assert home.view.leases.leaves[key(1).node_id].signed == leaf.view.own
    poll = next_poll(leaf, now=2.0)
    assert poll.message.records == ()
    home.view.leases.end(key(1).node_id)
    deliver(poll, leaf, home, now=2.0)
    assert next_poll(leaf, now=4.0).message.records == (leaf.view.own.sealed,)


def test_a_home_counts_its_leaves_in_its_record() -> None:
    _, home = leaf_with_home()
    before = home.view.own.order
    home._reissue_at = 2.0
    home.tick(now=2.0)
    assert home.view.own.order > before
    assert home.view.own.record.leaves == 1
    run_until(home, LEASE_S + 2 * RULES.reissue_rounds * RULES.round_s, now=40.0)
    assert home.view.own.record.leaves == 0


def test_a_leaf_that_leaves_or_becomes_public_has_no_lease() -> None:
    leaf, home = leaf_with_home()
    (farewell, *_) = calls_in(leaf.leave(now=1.0))
    home.receive(key(1).node_id, farewell.message, host=ELSEWHERE, now=1.0)
    assert len(home.view.leases) == 0
    leaf, home = leaf_with_home()
    introduce(home, signed(1, 9))
    assert len(home.view.leases) == 0


def test_a_full_home_says_so_and_is_exchanged() -> None:
    leaf, home = core(1, public=False), core(2)
    for number in range(MAX_LEAVES):
        home.view.leases.renew(NodeId(f"other {number}"), network=f"{number}", now=0.0)
    introduce(leaf, home.view.own)
    poll = next_poll(leaf, now=0.0)
    assert home.answer(key(1).node_id, poll.message, now=0.0).full
    deliver(poll, leaf, home, now=0.0)
    assert leaf.homes.homes == []


def test_a_leaf_chooses_the_learner_only_where_there_are_too_few_others() -> None:
    leaf = core(1, public=False)
    introduce(leaf, signed(0), signed(2))
    leaf.tick(now=0.0)
    assert set(nodes_of(leaf.homes)) == {key(0).node_id, key(2).node_id}
    introduce(leaf, *(signed(number) for number in range(3, 3 + RULES.homes)))
    leaf.tick(now=1.0)
    assert key(0).node_id not in nodes_of(leaf.homes)
    assert len(leaf.homes.homes) == RULES.homes


def test_a_home_that_withdraws_does_not_keep_the_leaf_busy() -> None:
    leaf, _ = leaf_with_home()
    now = leaf.deadline()
    leaf.tick(now=now - 1e-9)
    introduce(leaf, signed(2, 99, reachability="gone", addresses=()), now=now)
    for _ in range(5):
        now = max(now, leaf.deadline())
        leaf.tick(now=now)
        assert leaf.deadline() > now


def test_a_leaf_asks_others_than_its_homes_so_that_they_cannot_keep_it_to_themselves() -> None:
    leaf = core(1, public=False)
    introduce(leaf, *(signed(number) for number in range(2, 12)))
    effects = run_until(leaf, 1.3 * RULES.refresh_rounds * RULES.round_s, now=0.0)
    refreshes = [call for call in calls_in([effect for _, effect in effects]) if call.message.asks]
    assert refreshes
    assert all(call.message.digest for call in refreshes)
    answering = core(2)
    introduce(answering, *(signed(number) for number in range(20, 30)))
    answer = answering.answer(key(1).node_id, refreshes[0].message, now=0.0)
    assert 0 < len(answer.records) <= refreshes[0].message.asks + 1


def test_a_leaf_keeps_room_for_homes_and_learner_whatever_it_is_told() -> None:
    leaf = core(1, public=False)
    introduce(leaf, signed(0), signed(2), signed(3), signed(4))
    leaf.tick(now=0.0)
    kept = {*nodes_of(leaf.homes), key(0).node_id}
    for number in range(100, 100 + 3 * RULES.leaf_publics):
        introduce(leaf, signed(number), now=1.0)
        assert len(leaf.view.table) <= RULES.leaf_publics
    assert kept <= {peer.signed.node for peer in leaf.view.table}


def test_records_that_are_refused_displace_nobody() -> None:
    leaf = core(1, public=False)
    introduce(leaf, *(signed(number) for number in range(2, 2 + RULES.leaf_publics)))
    known = set(leaf.view.table.by_prefix)
    assert len(known) == RULES.leaf_publics
    introduce(leaf, *(signed(number) for number in range(200, 230)), now=100.0, age_s=DEAD_S + 1)
    assert set(leaf.view.table.by_prefix) == known


def test_a_leaf_of_which_all_publics_are_gone_says_hello_again() -> None:
    """The learner's last address is kept for ever; it must not keep the leaf from its bootstraps."""
    leaf = core(1, public=False)
    introduce(leaf, signed(0), signed(2))
    effects = run_until(leaf, 2 * LIFE_S, now=0.0)
    assert [peer.signed.node for peer in leaf.view.table] == [key(0).node_id]
    assert [at for at, effect in effects if effect == Greet() and at > LIFE_S]


def test_a_leaf_that_is_served_leaves_the_bootstraps_alone() -> None:
    leaf, home = leaf_with_home()
    now, greeted = 0.0, 0
    while now < LIFE_S:
        now = max(now, leaf.deadline())
        effects = leaf.tick(now=now)
        greeted += effects.count(Greet())
        for call in calls_in(effects):
            deliver(call, leaf, home, now=now, held_s=call.message.hold_s)
    assert greeted == 0
