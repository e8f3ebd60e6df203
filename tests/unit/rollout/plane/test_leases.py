"""The states of a sample, its seed, and the nodes that work on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from unittest.mock import PropertyMock

import pytest
from msgspec import structs

from swarm.rollout.plane.groups import ALL_FAILED_RETRY_S, LEASE_SLACK_S, RETRY_S, Group, LeaseTable, sample_seed
from swarm.rollout.plane.nodes import (
    LIMIT_FACTOR,
    MAX_HELD,
    MIN_LIMIT_S,
    NEW_ANSWERS,
    SLOWEST_TOKENS_PER_S,
    UNPROVEN_HELD,
)
from swarm.types import GroupId, Lease, NodeId, Score
from tests.builders import ALICE, BOB, RULES, STOP, lease, open_group, rollout, v

TIME_LIMIT_S = 600.0
LONG = 131_072

CAROL = NodeId("carol")


def claim(table: LeaseTable, group: Group, node: NodeId, capacity: int, *, now: float) -> Lease:
    """The one lease that the table gives, or one of nothing."""
    leases = table.claim(group, node, capacity, now=now, max_tokens=1000)
    return leases[0] if leases else structs.replace(lease(), samples=())


@pytest.fixture
def table() -> LeaseTable:
    """A table that has heard Alice and Bob at time 0; a beat is a second."""
    table = LeaseTable(run_seed=7, beat_s=1.0, time_limit_s=TIME_LIMIT_S)
    table.hear(ALICE, now=0.0)
    table.hear(BOB, now=0.0)
    return table


def test_only_one_answer_is_taken(table: LeaseTable) -> None:
    group = open_group(table, 0, size=1)
    for token in (3, 4):
        table.answer(group, rollout(tokens=(token, STOP)), ALICE)
    assert (group.samples[0].rollout, group.answered) == (rollout(tokens=(3, STOP)), 1)


def test_only_the_holder_can_release_a_sample(table: LeaseTable) -> None:
    group = open_group(table, 0)
    claim(table, group, ALICE, 1, now=0.0)
    for node, name, index in ((BOB, "t0", 0), (ALICE, "t0", 1), (ALICE, "t0", 65_535), (ALICE, "unknown", 0)):
        table.release(node, name, index)
    assert group.samples[0].node == ALICE
    table.release(ALICE, "t0", 0)
    assert group.samples[0].waiting


def test_a_group_is_as_old_as_its_opening_until_all_have_answered(table: LeaseTable) -> None:
    group = open_group(table, 0, version=1)
    table.answer(group, rollout(index=0, version=3), ALICE)
    assert group.oldest_version == 1
    table.answer(group, rollout(index=1, version=2), ALICE)
    assert group.oldest_version == 2


def test_seeds_are_the_same_in_every_process_and_differ_by_run_group_and_place() -> None:
    assert sample_seed(7, GroupId("t0"), 0) == 8872825424519278814
    places = [(run, GroupId(f"t{g}"), i) for run in (0, 1) for g in range(40) for i in range(40)]
    seeds = {sample_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_one_node_may_hold_only_so_much_and_little_while_it_is_new(table: LeaseTable) -> None:
    group = open_group(table, 0, size=NEW_ANSWERS)
    assert table.room(ALICE) == UNPROVEN_HELD
    claim(table, group, ALICE, NEW_ANSWERS, now=0.0)
    assert table.room(ALICE) == UNPROVEN_HELD - NEW_ANSWERS
    for index in range(NEW_ANSWERS):
        assert table.room(ALICE) == UNPROVEN_HELD - NEW_ANSWERS + index
        table.answer(group, rollout(index=index), ALICE)
    assert table.room(ALICE) == MAX_HELD


def test_newcomers_from_the_address_of_one_who_was_caught_hold_one_sample_together(table: LeaseTable) -> None:
    group = open_group(table, 0, size=NEW_ANSWERS + 2)
    for node in (ALICE, BOB, CAROL):
        table.hear(node, now=0.0, caller="192.0.2.7")
    for index in range(NEW_ANSWERS):
        table.answer(group, rollout(index=index), CAROL)
    table.doubt(ALICE)
    table.forget(ALICE)
    assert [table.room(node) for node in (BOB, CAROL)] == [1, MAX_HELD], "who has proven itself is no newcomer"
    claim(table, group, CAROL, 1, now=0.0)
    assert table.room(BOB) == 1
    claim(table, group, BOB, 1, now=0.0)
    table.hear(ALICE, now=0.0, caller="192.0.2.7")
    assert [table.room(node) for node in (ALICE, BOB)] == [0, 0]
    table.trust(ALICE)
    assert table.room(ALICE) == UNPROVEN_HELD


def test_who_was_caught_after_it_left_makes_its_address_doubted_until_each_is_let_in(table: LeaseTable) -> None:
    for node in (ALICE, BOB):
        table.hear(node, now=0.0, caller="192.0.2.1")
        table.forget(node)
        table.doubt(node)
    table.hear(CAROL, now=0.0, caller="192.0.2.1")
    table.hear(NodeId("dave"), now=0.0)
    assert table.room(NodeId("dave")) == UNPROVEN_HELD, "who has no address is nobody's neighbour"
    table.trust(ALICE)
    assert table.room(CAROL) == 1
    table.trust(BOB)
    assert table.room(CAROL) > 1


def test_who_keeps_samples_past_their_limit_gets_one_at_a_time_until_it_answers(table: LeaseTable) -> None:
    group = open_group(table, 0, size=10)
    claim(table, group, ALICE, 4, now=0.0)
    table.take_overdue(now=TIME_LIMIT_S + LEASE_SLACK_S)
    assert table.room(ALICE) == 1
    claim(table, group, ALICE, 1, now=0.0)
    assert table.room(ALICE) == 0
    table.answer(group, rollout(index=0), ALICE)
    assert table.room(ALICE) == UNPROVEN_HELD


def test_a_node_that_is_alone_does_not_fail_a_sample_again_at_once() -> None:
    alone = LeaseTable(run_seed=7, beat_s=1.0, time_limit_s=TIME_LIMIT_S)
    alone.hear(ALICE, now=0.0)
    group = open_group(alone, 0, size=1)
    claim(alone, group, ALICE, 1, now=0.0)
    alone.release(ALICE, group.group_id, 0, wrong_at=1.0)
    assert not claim(alone, group, ALICE, 1, now=0.9 + ALL_FAILED_RETRY_S).samples
    assert claim(alone, group, ALICE, 1, now=1.0 + ALL_FAILED_RETRY_S).samples


def test_one_node_alone_never_makes_a_sample_hopeless_while_others_are_there(table: LeaseTable) -> None:
    group = open_group(table, 0, size=1)
    for attempt in range(20):
        now = attempt * RETRY_S
        claim(table, group, ALICE, 1, now=now)
        assert not table.fail(ALICE, group, 0, now=now)


@pytest.mark.parametrize(
    ("tokens_per_s", "longest", "limit_s"),
    [
        *((0.0, 6, TIME_LIMIT_S), (0.5, 6, LIMIT_FACTOR * 6 / 0.5), (1e9, 6, MIN_LIMIT_S), (1e-300, 6, TIME_LIMIT_S)),
        # To fail what is long and slow would favour short answers; to believe any rate would keep it from others.
        *((20.0, LONG, LIMIT_FACTOR * LONG / 20.0), (1e-300, LONG, LONG / SLOWEST_TOKENS_PER_S)),
    ],
)
def test_a_time_limit_is_what_the_longest_completion_takes_eight_times(
    table: LeaseTable, tokens_per_s: float, longest: int, limit_s: float
) -> None:
    table.hear(ALICE, now=0.0, tokens_per_s=tokens_per_s)
    table.hear(ALICE, now=0.0)  # A beat without a rate changes none
    group = open_group(table, 0, size=2)
    group.rules = structs.replace(RULES, max_new_tokens=longest)
    assert claim(table, group, ALICE, 1, now=5.0).time_limit_s == pytest.approx(limit_s)
    assert table.take_overdue(now=5.0 + limit_s + LEASE_SLACK_S - 0.1) == []
    assert table.take_overdue(now=5.0 + limit_s + LEASE_SLACK_S + 0.1) == [(ALICE, (("t0", 0),))]
    assert claim(table, group, BOB, 1, now=5.0).time_limit_s == max(TIME_LIMIT_S, longest / SLOWEST_TOKENS_PER_S)


def test_groups_whose_answers_are_long_are_offered_first_among_those_of_one_version(table: LeaseTable) -> None:
    lengths = {0: 0, 1: 2, 2: 6, 3: 4}
    for number, length in lengths.items():
        group = open_group(table, number)
        if length:
            table.answer(group, rollout(group_id=f"t{number}", tokens=[3] * (length - 1) + [2]), ALICE)
    table.answer(open_group(table, 4, version=1), rollout(group_id="t4", tokens=[3] * 5 + [2], version=1), ALICE)
    assert [group.order for group in table.claimable(v(0))] == [2, 3, 1, 0], "nothing newer than a node holds"
    assert [group.order for group in table.claimable(v(1))] == [2, 3, 1, 0, 4]
    open_group(table, 9, purpose="eval")
    assert table.claimable(v(1))[0].purpose == "eval"


def test_groups_are_put_in_order_when_they_change_and_not_for_each_node_that_asks(
    table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [open_group(table, number) for number in range(100)]
    monkeypatch.setattr(Group, "mean_tokens", measured := PropertyMock(return_value=1.0))
    for _ in range(100):
        assert len(table.claimable(v(1))) == 100
    assert measured.call_count == 0
    table.answer(groups[7], rollout(group_id="t7"), ALICE)
    assert [group.order for group in table.claimable(v(1))][:2] == [7, 0]
    assert measured.call_count == 1


def test_what_the_table_counts_is_what_a_look_at_every_sample_would_count() -> None:
    draw, opened = Random(5), 0
    table = LeaseTable(run_seed=7, beat_s=1.0, time_limit_s=TIME_LIMIT_S)
    unfilled = Counter[bool]()
    for _ in range(600):
        groups = list(table.groups())
        table.hear(ALICE, now=0.0)
        table.hear(BOB, now=0.0)
        node, group = draw.choice((ALICE, BOB)), draw.choice(groups) if groups else None
        match draw.randrange(10):
            case 0:
                table.forget(node)
            case 9 if group is not None:
                table.withdraw(group, draw.randrange(3))
            case 1 if group is not None and len(groups) > 4:
                table.close(group)
            case 2 | 3 if group is not None:
                claim(table, group, node, draw.randrange(1, 3), now=0.0)
            case 4 if group is not None:
                table.release(node, group.group_id, draw.randrange(3))
            case 5 | 6 | 7 if group is not None:
                version, tokens = group.min_version.version + draw.randrange(3), [3] * draw.randrange(4) + [2]
                said = rollout(group_id=group.group_id, index=draw.randrange(3), version=version, tokens=tokens)
                table.answer(group, said, node)
            case _:
                open_group(table, opened, version=draw.randrange(4), size=3)
                opened += 1
        fillable = {one.group_id for one in table.groups() if any(sample.waiting for sample in one.samples)}
        offered = table.claimable(v(9))
        assert {one.group_id for one in offered} == fillable
        assert offered == sorted(offered, key=lambda one: (one.min_version, -one.mean_tokens, one.order))
        assert table.by_deadline(2) == Counter(one.oldest_version + 2 for one in table.groups())
        assert all(one.waiting == sum(sample.waiting for sample in one.samples) for one in table.groups())
        unfilled.update(one.group_id in fillable for one in table.groups())
    assert min(unfilled.values()) > 100


def test_there_is_a_chance_when_a_sample_goes_back_to_waiting(table: LeaseTable) -> None:
    group = open_group(table, 0, size=4)

    def chances_after(free: Callable[[], object]) -> int:
        claim(table, group, ALICE, 1, now=0.0)
        before = table.chances
        free()
        return table.chances - before

    in_hand = open_group(table, 1, size=1)
    claim(table, in_hand, ALICE, 1, now=TIME_LIMIT_S)
    assert chances_after(lambda: table.release(ALICE, "t0", 0)) == 1
    assert chances_after(lambda: table.keep(ALICE, [("t1", 0)])) == 1
    assert chances_after(lambda: table.take_overdue(now=TIME_LIMIT_S + 2 * LEASE_SLACK_S)) == 1
    assert chances_after(lambda: table.answer(group, rollout(index=0), ALICE)) == 0
    # With that its hands are empty, and who asks ahead no more may get more.
    before = table.chances
    table.answer(in_hand, rollout(group_id="t1"), ALICE)
    assert table.chances == before + 1
    assert chances_after(lambda: table.forget(ALICE)) == 1


@pytest.mark.parametrize(
    ("version", "scored", "chances"),
    [(0, True, 0), (1, True, 1), (0, False, 1)],
    ids=["as was thought", "due later", "dropped"],
)
def test_there_is_a_chance_when_a_group_leaves_the_table_sooner_or_is_due_later(
    table: LeaseTable, version: int, scored: bool, chances: int
) -> None:
    group = open_group(table, 0, size=1)
    table.answer(group, rollout(version=version), ALICE)
    group.samples[0].score = Score(reward=1.0, exact=True) if scored else None
    table.close(group)
    assert table.chances == chances
