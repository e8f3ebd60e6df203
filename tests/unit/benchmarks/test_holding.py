"""When a batch that is ready is held, and for how long."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.holding import HoldingPlane, may_take
from swarm.types import Lease
from tests.builders import ALICE, BOB, ask, new_plane, prompt, submit_and_score, v


def plane_that_holds(hold_s: float) -> tuple[HoldingPlane, Lease]:
    """Batches of one group of one sample. Alice's t0 is due by batch 1, which is ready without it: Bob's t1 was batch
    0, and his t2 is of version 1."""
    rules = replace(new_plane(max_staleness=1, groups=1, size=1).rules, adaptive=False)
    plane = HoldingPlane(rules, prompts=prompt, hold_s=hold_s)
    plane.published(v(0))
    (slow,) = ask(plane, ALICE, 0, 1)
    submit_and_score(plane, BOB, ask(plane, BOB, 0, 1), 0)
    assert plane.can_take(now=0.0)
    plane.take()
    plane.published(v(1))
    submit_and_score(plane, BOB, ask(plane, BOB, 1, 1), 1)
    return plane, slow


def test_a_batch_waits_for_what_it_would_leave_behind_and_no_longer_than_it_may() -> None:
    plane, _ = plane_that_holds(0.0)
    assert plane.can_take(now=10.0)
    plane, _ = plane_that_holds(5.0)
    assert [plane.can_take(now=now) for now in (10.0, 14.9)] == [False, False]
    assert plane.hold_until() == 15.0
    plane.pause(True)
    assert plane.hold_until() is None, "or the learner would look for it again and again"
    plane.pause(False)
    assert plane.can_take(now=15.0)
    plane.take()
    assert plane.hold_until() is None


def test_an_unlimited_hold_ends_when_the_group_is_there() -> None:
    plane, slow = plane_that_holds(math.inf)
    assert not plane.can_take(now=1e9)
    assert plane.hold_until() is None
    submit_and_score(plane, ALICE, [slow], 0)
    assert plane.can_take(now=1e9)
    assert [group.group_id for group in plane.take()[0]] == ["t0"]


@pytest.mark.parametrize(
    ("others", "batch", "may"),
    [
        ({}, {5: 2}, True),
        # One that is due now would be left behind.
        ({5: 1}, {5: 1, 6: 1}, False),
        # Those due by d fit into the batches after this one and by d, or do not.
        ({6: 2}, {5: 2}, True),
        ({6: 3}, {7: 2}, False),
        ({6: 1, 7: 3}, {5: 2}, True),
        ({6: 2, 7: 3}, {8: 2}, False),
        # What is past its deadline is not waited for.
        ({4: 7, 6: 2}, {5: 2}, True),
        # More are due by 5 than any order of batches can train: waiting would not help them.
        ({5: 3}, {5: 2}, True),
        # It would help one of these: the batch holds one due later in its place.
        ({5: 3}, {5: 1, 6: 1}, False),
    ],
)
def test_a_batch_is_held_while_waiting_helps_what_it_would_leave_behind(
    others: dict[int, int], batch: dict[int, int], may: bool
) -> None:
    assert may_take(others, batch, 5, 2) is may
