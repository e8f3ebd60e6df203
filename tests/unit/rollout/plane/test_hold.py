"""When a batch that is ready is held, for how long, and what another bound changes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.rollout.journal.entries import BatchTaken, GroupDropped
from swarm.rollout.plane.effects import Judged
from swarm.rollout.plane.plane import RolloutPlane
from swarm.types import Lease, NodeId
from tests.builders import ALICE, BOB, answering, answers, ask, new_plane, prompt, refusal, rollout, submit_and_score, v

SLOW = NodeId("slow")


def plane_that_holds(hold_s: float, *, max_staleness: int = 1) -> RolloutPlane:
    """Batches of one group of one sample; version 0 is published."""
    rules = replace(new_plane(max_staleness=max_staleness, groups=1, size=1).rules, hold_s=hold_s, adaptive=False)
    plane = RolloutPlane(rules, prompts=prompt)
    plane.published(v(0))
    return plane


def one_left_behind(plane: RolloutPlane) -> Lease:
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
    plane = RolloutPlane(replace(plane_that_holds(math.inf).rules, adaptive=True), prompts=prompt)
    plane.published(v(0))
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


# -- another bound -----------------------------------------------------------------------------------------------


def test_a_higher_bound_makes_room_at_once() -> None:
    plane = plane_that_holds(0.0)
    assert len(ask(plane, ALICE, 0, 9)) == 2
    assert refusal(plane, ALICE, 0) == "paced"
    assert plane.set_bound(3) == []
    assert len(ask(plane, BOB, 0, 9)) == 2


def test_a_lower_bound_drops_what_is_ready_and_too_old_by_it() -> None:
    plane = plane_that_holds(0.0, max_staleness=2)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 3), 0)
    plane.take()
    plane.published(v(1))
    first, second = plane.set_bound(0)
    assert isinstance(first, GroupDropped)
    assert isinstance(second, GroupDropped)
    assert {first.reason, second.reason} == {"bound_lowered"}
    assert (first.nodes, first.next_batch, first.max_staleness) == ({ALICE: 1}, 1, 0)
    assert refusal(plane, ALICE, 0) == "behind"
    assert len(ask(plane, BOB, 1, 9)) == 1


@pytest.mark.parametrize(("lowered", "said"), [(True, "bound_lowered"), (False, "stale")])
def test_an_answer_that_only_a_lower_bound_makes_stale_is_counted_as_such(lowered: bool, said: str) -> None:
    plane = plane_that_holds(0.0)
    slow = one_left_behind(plane)
    if lowered:
        plane.set_bound(0)
    else:
        plane.take()
    lease, late = answers([slow], 0)[0]
    judged, *_ = plane.submit(ALICE, answering(lease, late), now=0.0)
    assert isinstance(judged, Judged)
    assert (judged.verdict, judged.counted_as) == ("stale", said)


def test_a_batch_is_recorded_with_the_bound_that_it_was_checked_against() -> None:
    plane = plane_that_holds(0.0)
    submit_and_score(plane, ALICE, ask(plane, ALICE, 0, 1), 0)
    plane.set_bound(4)
    _, (taken, *_) = plane.take()
    assert taken == BatchTaken(step=0, max_staleness=4, numbers=(0,))


def test_a_group_remembers_the_bound_of_its_opening_and_not_a_later_one() -> None:
    """S is 1, then 3: what is stale by 1 again is the user's doing only if it was opened under 3."""
    plane = plane_that_holds(0.0)
    slow = one_left_behind(plane)
    plane.set_bound(3)
    plane.take()
    plane.published(v(2))
    plane.set_bound(1)
    judged, *_ = plane.submit(ALICE, answering(slow, rollout(group_id="t0", version=0)), now=0.0)
    assert isinstance(judged, Judged)
    assert judged.counted_as == "stale"
