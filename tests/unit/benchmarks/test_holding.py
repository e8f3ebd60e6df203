"""When a batch that is ready is held, and for how long."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.holding import HoldingPacing, HoldingPlane, may_take
from swarm.rollout.journal.entries import BatchTaken, GroupDropped
from swarm.types import Lease, NodeId
from tests.builders import ALICE, BOB, answering, answers, ask, new_plane, prompt, refusal, submit_and_score, v

SLOW = NodeId("slow")


def plane_that_holds(hold_s: float, *, max_staleness: int = 1, adaptive: bool = False) -> HoldingPlane:
    """Batches of one group of one sample; version 0 is published."""
    rules = replace(new_plane(max_staleness=max_staleness, groups=1, size=1).rules, adaptive=adaptive)
    plane = HoldingPlane(rules, prompts=prompt, hold_s=hold_s)
    plane.published(v(0))
    return plane


def one_left_behind(plane: HoldingPlane) -> Lease:
    """Alice's t0 is due by batch 1, which is ready without it: Bob's t1 was batch 0, and his t2 is of version 1."""
    (slow,) = ask(plane, ALICE, 0, 1)
    submit_and_score(plane, BOB, ask(plane, BOB, 0, 1), 0)
    assert plane.can_take(now=0.0)
    plane.take()
    plane.published(v(1))
    submit_and_score(plane, BOB, ask(plane, BOB, 1, 1), 1)
    return slow


def test_without_hold_a_ready_batch_is_taken_whatever_it_leaves_behind() -> None:
    plane = plane_that_holds(0.0)
    one_left_behind(plane)
    assert plane.can_take(now=10.0)
    assert plane.hold_until() is None


def test_a_batch_waits_for_what_it_would_leave_behind_and_no_longer_than_it_may() -> None:
    plane = plane_that_holds(5.0)
    assert plane.hold_until() is None
    one_left_behind(plane)
    assert not plane.can_take(now=10.0)
    assert plane.hold_until() == 15.0
    assert not plane.can_take(now=14.9)
    assert plane.can_take(now=15.0)


def test_the_wait_begins_anew_with_each_batch() -> None:
    plane = plane_that_holds(5.0)
    one_left_behind(plane)
    assert not plane.can_take(now=10.0)
    assert plane.can_take(now=15.0)
    plane.take()
    assert plane.hold_until() is None
    assert not plane.can_take(now=16.0)
    assert plane.hold_until() is None


def test_the_slowest_may_have_the_sample_that_a_batch_is_held_for() -> None:
    plane = plane_that_holds(math.inf, adaptive=True)
    for step in range(2):
        submit_and_score(plane, BOB, ask(plane, BOB, step, 1), step)
        assert plane.can_take(now=60.0 * step)
        plane.take()
        plane.published(v(step + 1))
    (lost,) = ask(plane, ALICE, 1, 1)
    submit_and_score(plane, BOB, ask(plane, BOB, 2, 1), 2)
    plane.leave(ALICE)
    plane.beat(SLOW, now=100.0, tokens_per_s=1e-6)
    assert refusal(plane, SLOW, 2) == "paced"
    before = plane.leased.chances
    assert not plane.can_take(now=100.0)
    assert plane.leased.chances == before + 1
    (lease,) = ask(plane, SLOW, 2, 1)
    assert lease.group_id == lost.group_id


def test_an_unlimited_hold_ends_when_the_group_is_there() -> None:
    plane = plane_that_holds(math.inf)
    slow = one_left_behind(plane)
    assert not plane.can_take(now=1e9)
    assert plane.hold_until() is None
    submit_and_score(plane, ALICE, [slow], 0)
    assert plane.can_take(now=1e9)
    batch, effects = plane.take()
    assert [group.group_id for group in batch] == ["t0"]
    assert [type(effect) for effect in effects] == [BatchTaken]


def test_an_unlimited_hold_ends_when_the_group_is_given_up() -> None:
    plane = plane_that_holds(math.inf)
    ((given, answer),) = answers([one_left_behind(plane)], 0)
    plane.submit(ALICE, answering(given, answer), now=0.0)
    assert not plane.can_take(now=0.0)
    (group,) = plane.leased.groups()
    plane._drop(group, "generation_failed")
    assert plane.can_take(now=0.0)


def test_nothing_is_held_for_a_group_that_is_due_later() -> None:
    plane = plane_that_holds(math.inf)
    ask(plane, ALICE, 0, 1)
    submit_and_score(plane, BOB, ask(plane, BOB, 0, 1), 0)
    assert plane.can_take(now=0.0)


def test_a_bound_that_was_lowered_does_not_hold_the_batch_for_ever() -> None:
    """Three groups are due by batch 0, which has room for one: no wait helps the other two."""
    plane = plane_that_holds(math.inf, max_staleness=2)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 3), 0)
    assert plane.set_bound(0) == []
    assert plane.can_take(now=0.0)
    _, effects = plane.take()
    drops = [effect for effect in effects if isinstance(effect, GroupDropped)]
    assert [(one.group_id, one.reason, one.max_staleness) for one in drops] == [
        ("t1", "bound_lowered", 0),
        ("t2", "bound_lowered", 0),
    ]


def test_a_pause_makes_no_full_batch_due() -> None:
    """Or the learner would look for it again and again."""
    plane = plane_that_holds(15.0)
    one_left_behind(plane)
    assert not plane.can_take(now=0.0)
    assert plane.hold_until() == 15.0
    plane.pause(True)
    assert plane.hold_until() is None
    assert not plane.can_take(now=60.0)
    plane.pause(False)
    assert plane.can_take(now=60.0)


@pytest.mark.parametrize(
    ("others", "batch", "may"),
    [
        ({}, {5: 2}, True),
        # One that is due now would be left behind.
        ({5: 1}, {5: 1, 6: 1}, False),
        ({5: 1}, {6: 2}, False),
        # Those due by d fit into the batches after this one and by d, or do not.
        ({6: 2}, {5: 2}, True),
        ({6: 3}, {7: 2}, False),
        ({6: 1, 7: 3}, {5: 2}, True),
        ({6: 2, 7: 3}, {8: 2}, False),
        ({6: 2, 9: 6}, {5: 2}, True),
        # What is past its deadline is not waited for.
        ({4: 7, 6: 2}, {5: 2}, True),
        # More are due by 5 and 6 than any order of batches can train: waiting would not help them.
        ({5: 1}, {5: 2}, True),
        ({6: 3}, {5: 2}, True),
        ({5: 3}, {5: 2}, True),
        ({5: 1, 6: 4}, {5: 2}, True),
        # It would help one of these: the batch holds one due later in its place.
        ({5: 3}, {5: 1, 6: 1}, False),
    ],
)
def test_a_batch_is_held_while_waiting_helps_what_it_would_leave_behind(
    others: dict[int, int], batch: dict[int, int], may: bool
) -> None:
    assert may_take(others, batch, 5, 2) is may


def new(hold_s: float) -> HoldingPacing:
    return HoldingPacing(batch_groups=16, hold_s=hold_s, adaptive=False)


@pytest.mark.parametrize("hold_s", [5.0, math.inf])
def test_who_would_rather_wait_than_discard_has_none_to_spare(hold_s: float) -> None:
    pacing = new(hold_s)
    for _ in range(2):
        assert not pacing.is_whole(14, 4)
        assert pacing.is_whole(16, 4)
        pacing.taken(now=0.0)
    assert pacing.may_open(6, {10: 15}, 10, 4, ahead=False)
    assert not pacing.may_open(6, {10: 16}, 10, 4, ahead=False)


def test_a_whole_batch_that_would_leave_groups_behind_waits_hold_s() -> None:
    pacing = new(5.0)
    assert pacing.is_whole(16, 4)
    assert pacing.may_take({10: 0, 11: 16}, {}, 10, now=1.0)
    assert not pacing.may_take({10: 1}, {}, 10, now=1.0)
    assert pacing.hold_until() == 6.0
    assert not pacing.may_take({10: 1}, {}, 10, now=5.9)
    assert pacing.may_take({10: 1}, {}, 10, now=6.0)
    pacing.taken(now=0.0)
    assert pacing.hold_until() is None


def test_without_a_limit_it_waits_for_ever_and_without_hold_never() -> None:
    patient = new(math.inf)
    assert not patient.may_take({10: 1}, {}, 10, now=1e9)
    assert patient.hold_until() is None
    assert new(0.0).may_take({10: 1}, {}, 10, now=0.0)
