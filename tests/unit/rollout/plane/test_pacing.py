"""How many groups are to spare, whether a whole batch waits, and what is leased ahead of an engine."""

from __future__ import annotations

import math

import pytest

from swarm.rollout.plane.effects import Granted
from swarm.rollout.plane.rules import Pacing
from swarm.types import NodeId
from tests.builders import ALICE, BOB, ask, new_plane, prompt, refusal, submit_and_score, v


def places(pacing: Pacing, *, ahead: bool = False) -> int:
    """How many groups due at 10 the rule opens before batch 10."""
    opened = 0
    while pacing.may_open(10, {10: opened}, 10, ahead=ahead):
        opened += 1
    return opened


def step(pacing: Pacing, *ready: int) -> None:
    """One batch of 16, of which so many were ready when the learner looked."""
    for count in ready:
        assert not pacing.is_whole(count)
    assert pacing.is_whole(16)
    pacing.taken()


def new(hold_s: float = 0.0) -> Pacing:
    return Pacing(batch_groups=16, hold_s=hold_s)


def test_while_the_learner_never_waits_no_group_is_to_spare() -> None:
    pacing = new()
    step(pacing)
    assert places(pacing) == 16


def test_a_learner_that_waited_has_groups_to_spare_and_loses_them_again() -> None:
    pacing = new()
    step(pacing, 14, 15, 15)
    assert places(pacing) == 17
    step(pacing)
    assert places(pacing) == 16


def test_no_more_than_an_eighth_of_a_batch_is_to_spare() -> None:
    pacing = new()
    for _ in range(3):
        step(pacing, 14)
    assert places(pacing) == 18
    for _ in range(13):
        step(pacing)
    assert places(pacing) == 17


@pytest.mark.parametrize("hold_s", [5.0, math.inf])
def test_who_would_rather_wait_than_discard_has_none_to_spare(hold_s: float) -> None:
    pacing = new(hold_s)
    step(pacing, 14)
    step(pacing, 14)
    assert places(pacing) == 16


def test_a_fleet_that_is_too_slow_for_whole_batches_gets_none_to_spare() -> None:
    pacing = new()
    for _ in range(8):
        step(pacing, 13)
    assert places(pacing) == 16


def test_who_asks_ahead_gets_nothing_to_spare_and_none_of_the_last_places() -> None:
    pacing = new()
    step(pacing, 14)
    assert places(pacing, ahead=True) == 0
    assert pacing.may_open(11, {10: 15}, 10, ahead=True)
    assert not pacing.may_open(11, {10: 16}, 10, ahead=True)


def test_a_whole_batch_that_would_leave_groups_behind_waits_hold_s() -> None:
    pacing = new(5.0)
    assert pacing.is_whole(16)
    assert pacing.may_take({10: 0, 11: 16}, {}, 10, now=1.0)
    assert not pacing.may_take({10: 1}, {}, 10, now=1.0)
    assert pacing.hold_until() == 6.0
    assert not pacing.may_take({10: 1}, {}, 10, now=5.9)
    assert pacing.may_take({10: 1}, {}, 10, now=6.0)
    pacing.taken()
    assert pacing.hold_until() is None


def test_without_a_limit_it_waits_for_ever_and_without_hold_never() -> None:
    patient = new(math.inf)
    assert not patient.may_take({10: 1}, {}, 10, now=1e9)
    assert patient.hold_until() is None
    assert new().may_take({10: 1}, {}, 10, now=0.0)


def test_who_still_holds_samples_gets_none_of_the_last_batch_of_places() -> None:
    plane = new_plane(max_staleness=1, groups=2, size=1)
    assert len(ask(plane, ALICE, 0, 1)) == 1
    assert [one.group_id for one in ask(plane, ALICE, 0, 100)] == ["t1"]
    assert refusal(plane, ALICE, 0) == "paced"
    assert len(ask(plane, BOB, 0, 100)) == 2


def test_with_a_bound_of_zero_nothing_is_leased_ahead() -> None:
    plane = new_plane(max_staleness=0, groups=2, size=1)
    first = ask(plane, ALICE, 0, 1)
    assert refusal(plane, ALICE, 0) == "paced"
    submit_and_score(plane, ALICE, first, 0)
    assert len(ask(plane, ALICE, 0, 1)) == 1


def test_a_group_that_was_begun_is_left_to_who_can_begin_at_once() -> None:
    plane = new_plane(groups=2, size=2)
    mine = ask(plane, ALICE, 0, 2)
    (begun,) = ask(plane, BOB, 0, 1)
    assert refusal(plane, ALICE, 0, 3) == "paced"
    submit_and_score(plane, ALICE, mine, 0)
    rest, other = ask(plane, ALICE, 0, 3)
    assert (rest.group_id, rest.samples[0].index, other.group_id) == (begun.group_id, 1, "t2")


def test_places_that_are_free_while_others_work_are_not_ahead() -> None:
    plane = new_plane(max_staleness=0, groups=2, size=2)
    ask(plane, ALICE, 0, 1)
    assert refusal(plane, ALICE, 0, 3) == "paced"
    *_, answer = plane.ask(ALICE, v(0), 3, at_once=2, now=0.0)
    assert isinstance(answer, Granted)
    assert [(one.group_id, [spec.index for spec in one.samples]) for one in answer.leases] == [
        ("t0", [1]),
        ("t1", [0, 1]),
    ]


def test_what_is_asked_beyond_the_free_places_is_ahead() -> None:
    plane = new_plane(max_staleness=0, groups=2, size=1)
    *_, answer = plane.ask(ALICE, v(0), 5, at_once=1, now=0.0)
    assert isinstance(answer, Granted)
    assert [one.group_id for one in answer.leases] == ["t0"]


def test_a_learner_that_waits_for_the_last_answers_has_one_more_group_opened() -> None:
    plane = new_plane(max_staleness=0, groups=16, size=1)
    for step in range(2):
        granted = ask(plane, ALICE, step, 100)
        assert len(granted) == 16
        submit_and_score(plane, ALICE, granted[:15], step)
        assert not plane.can_take(now=0.0)
        submit_and_score(plane, ALICE, granted[15:], step)
        plane.take()
        plane.published(v(step + 1))
    assert len(ask(plane, BOB, 2, 100)) == 17


def test_held_out_prompts_go_to_who_can_begin_them_once_no_training_is_left() -> None:
    plane = new_plane(max_staleness=0)
    ask(plane, ALICE, 0, 1)
    plane.evaluate(v(0), [prompt(0)])
    assert refusal(plane, ALICE, 0) == "paced"
    assert {one.purpose for one in ask(plane, BOB, 0, 100)} == {"train"}
    assert [one.purpose for one in ask(plane, NodeId("carol"), 0, 10)] == ["eval"]
