"""How many groups are to spare, and what is leased ahead of an engine."""

from __future__ import annotations

import math

import pytest

from swarm.rollout.plane.effects import Granted
from swarm.rollout.plane.rules import Pacing, aged_by
from tests.builders import ALICE, BOB, ask, new_plane, prompt, refusal, submit_and_score, v

BOUND = 4


def places(pacing: Pacing, *, ahead: bool = False, version: int = 6) -> int:
    """How many groups of that version the rule opens before batch 10; of version 6 they are due at 10."""
    due, opened = version + BOUND, 0
    while pacing.may_open(version, {due: opened}, 10, BOUND, ahead=ahead):
        opened += 1
    return opened


def step(pacing: Pacing, *ready: int, left: int = 0, now: float = 0.0) -> None:
    """One batch of 16, of which so many were ready when the learner looked. So many more are left for the next."""
    for count in ready:
        assert not pacing.is_whole(count, BOUND, now=now)
    assert pacing.is_whole(16 + left, BOUND, now=now)
    pacing.taken()


def new() -> Pacing:
    """Without an aim."""
    return Pacing(batch_groups=16, adaptive=False)


def aiming() -> Pacing:
    """One that has taken its first batch."""
    pacing = Pacing(batch_groups=16, adaptive=True)
    step(pacing)
    return pacing


def test_a_learner_that_waited_has_groups_to_spare_and_loses_them_again() -> None:
    pacing = new()
    step(pacing)
    assert places(pacing) == 16
    step(pacing, 14, 15, 15)
    assert places(pacing) == 17
    step(pacing)
    assert places(pacing) == 16
    for _ in range(3):
        step(pacing, 14)
    assert places(pacing) == 18, "no more than an eighth of a batch"
    for _ in range(13):
        step(pacing)
    assert places(pacing) == 17
    too_slow = new()
    for _ in range(8):
        step(too_slow, 13)
    assert places(too_slow) == 16, "for whole batches"


def test_who_asks_ahead_gets_nothing_to_spare_and_none_of_the_last_places() -> None:
    pacing = new()
    step(pacing, 14)
    assert places(pacing, ahead=True) == 0
    assert pacing.may_open(7, {10: 15}, 10, BOUND, ahead=True)
    assert not pacing.may_open(7, {10: 16}, 10, BOUND, ahead=True)


# -- the aim -------------------------------------------------------------------------------------------------------


def test_no_group_is_opened_that_is_expected_to_be_older_than_the_aim() -> None:
    pacing = aiming()
    assert pacing.aim == 5.0
    assert places(pacing, version=9) == 64
    assert places(pacing, version=7) == 32
    for _ in range(100):
        step(pacing, left=16)
    assert [places(pacing, version=version) for version in (10, 9, 8)] == [16, 0, 0]


def test_a_wait_raises_the_aim_by_what_was_missing_and_the_first_one_does_not() -> None:
    pacing = Pacing(batch_groups=16, adaptive=True)
    step(pacing, 0)
    assert pacing.aim == 5.0
    pacing.aim = 3.0
    step(pacing, 12, 14)
    assert pacing.aim == 3.25
    assert places(pacing, version=9) == 36


def test_with_the_highest_aim_everything_is_opened_that_the_bound_allows() -> None:
    pacing = aiming()
    for _ in range(5):
        step(pacing, 0)
    assert pacing.aim == BOUND + 1 + 1 / 8
    pacing.raise_aim(1.0, BOUND)
    assert pacing.aim == BOUND + 1 + 1 / 8
    without = new()
    for ahead in (False, True):
        found, all_there_are = ([places(p, version=v, ahead=ahead) for v in range(6, 11)] for p in (pacing, without))
        assert found == all_there_are


def test_what_a_waiting_learner_needs_is_opened_whatever_its_age() -> None:
    pacing = aiming()
    for _ in range(100):
        step(pacing, left=16)
    assert pacing.aim == 1.0
    assert places(pacing, version=6) == 0
    assert not pacing.is_whole(0, BOUND, now=0.0)
    assert places(pacing, version=6) == 16


def test_after_a_wait_the_least_surplus_of_eight_batches_lowers_the_aim_and_before_it_each() -> None:
    pacing = aiming()
    step(pacing, left=8)
    assert pacing.aim == pytest.approx(5.0 - 0.3 * (8 / 16 - 0.1)), "by what was left beyond a stock"
    pacing.aim = 4.0
    step(pacing, 15)
    assert pacing.aim == 4.0 + 1 / 16
    for left in (16, 16, 8, 16, 16, 16, 16):
        step(pacing, left=left)
    assert pacing.aim == 4.0 + 1 / 16
    step(pacing, left=16)
    assert pacing.aim == pytest.approx(4.0 + 1 / 16 - 0.3 * (8 / 16 - 0.1))
    lowered = pacing.aim
    step(pacing, 15, left=16)
    for _ in range(7):
        step(pacing, left=16)
    assert pacing.aim == lowered + 1 / 16


def test_who_asks_ahead_is_held_to_an_aim_of_a_step_less() -> None:
    pacing = aiming()
    pacing.aim = 4.0
    assert places(pacing, version=9, ahead=True) == 32
    assert places(pacing, version=8, ahead=True) == 16
    assert places(pacing, version=7, ahead=True) == 0


def test_a_node_that_would_answer_too_late_for_the_aim_opens_nothing_unless_the_learner_waits() -> None:
    pacing = aiming()
    pacing.aim = 4.0
    assert pacing.may_open(9, {}, 10, BOUND, ahead=False, answer_s=1e9)  # Nobody knows yet how long a step takes
    step(pacing, now=60.0)
    assert pacing.may_open(9, {}, 10, BOUND, ahead=False, answer_s=179.0)
    assert not pacing.may_open(9, {}, 10, BOUND, ahead=False, answer_s=180.0)
    assert not pacing.may_open(8, {}, 10, BOUND, ahead=False, answer_s=120.0)
    for number in range(1, 30):
        step(pacing, now=60.0 + 10.0 * number)
    pacing.aim = 4.0
    assert pacing.may_open(9, {}, 10, BOUND, ahead=False, answer_s=29.0), "a step is as long as the last ones were"
    assert not pacing.may_open(9, {}, 10, BOUND, ahead=False, answer_s=31.0)
    assert not pacing.is_whole(15, BOUND, now=350.0)
    assert pacing.may_open(8, {13: 15}, 10, BOUND, ahead=False, answer_s=1e9)
    without = new()
    step(without)
    step(without, now=60.0)
    assert without.may_open(9, {}, 10, BOUND, ahead=False, answer_s=1e9)
    assert without.may_claim(9, 10, answer_s=1e9)


@pytest.mark.parametrize(
    ("aim", "broadcast_steps", "by"),
    [(3.0, 0.0, "bound"), (math.inf, 5.0, "bound"), (2.9, 0.4, "generation"), (2.9, 0.5, "broadcast")],
)
def test_what_makes_the_data_as_old_as_it_is(aim: float, broadcast_steps: float, by: str) -> None:
    assert aged_by(aim=aim, max_staleness=2, mean_staleness=1.0, broadcast_steps=broadcast_steps) == by


# -- in the plane --------------------------------------------------------------------------------------------------


def test_who_still_holds_samples_gets_none_of_the_last_batch_of_places() -> None:
    plane = new_plane(max_staleness=1, groups=2, size=1)
    assert len(ask(plane, ALICE, 0, 1)) == 1
    assert [one.group_id for one in ask(plane, ALICE, 0, 100)] == ["t1"]
    assert refusal(plane, ALICE, 0) == "paced"
    assert len(ask(plane, BOB, 0, 100)) == 2


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
    assert refusal(plane, ALICE, 0, 3) == "paced", "with a bound of zero nothing is leased ahead"
    *_, answer = plane.ask(ALICE, v(0), 3, at_once=2, now=0.0)
    assert isinstance(answer, Granted)
    assert [(one.group_id, len(one.samples)) for one in answer.leases] == [("t0", 1), ("t1", 2)]


def test_a_sample_of_a_begun_group_is_kept_from_who_would_delay_it_until_the_learner_waits() -> None:
    plane = new_plane(groups=2, size=3)
    for number in range(2):
        submit_and_score(plane, ALICE, ask(plane, ALICE, number, 6), number)
        assert plane.can_take(now=60.0 * number)
        plane.take()
        plane.published(v(number + 1))
    plane.beat(ALICE, now=60.0, tokens_per_s=10.0)
    plane.beat(BOB, now=60.0, tokens_per_s=1e-6)
    assert len(ask(plane, ALICE, 2, 1)) == 1
    assert refusal(plane, BOB, 2) == "paced"
    before = plane.leased.chances
    assert not plane.can_take(now=70.0)
    assert plane.leased.chances == before + 1
    assert not plane.can_take(now=71.0)
    assert plane.leased.chances == before + 1
    (lease,) = ask(plane, BOB, 2, 2)
    assert len(lease.samples) == 2


def test_a_held_out_round_lets_the_data_be_a_little_older() -> None:
    plane = new_plane(max_staleness=8)
    for step in range(2):
        submit_and_score(plane, ALICE, ask(plane, ALICE, step, 4), step)
        assert plane.can_take(now=60.0 * step)
        plane.take()
        plane.published(v(step + 1))
    before = plane.age(mean_staleness=1.0, broadcast_steps=0.0)
    plane.evaluate(v(2), [prompt(0)])
    after = plane.age(mean_staleness=1.0, broadcast_steps=0.0)
    assert after == {"staleness/aim": before["staleness/aim"] + 0.25, "staleness/by": "generation"}


def handed(pacing: Pacing) -> int:
    """How many of 1,000 samples one question is given, in groups of 8."""
    return pacing.at_most(1000, 8)


def steps(pacing: Pacing, count: int, *, waited: int = 0) -> None:
    """So many batches, the first `waited` of which the learner had to wait for."""
    for i in range(count):
        step(pacing, *([15] if i < waited else []))


def test_while_the_learner_seldom_waits_a_batch_is_handed_out_in_parts() -> None:
    pacing = Pacing(batch_groups=16, adaptive=True)
    steps(pacing, 7)
    assert handed(pacing) == 1000
    steps(pacing, 1)
    assert handed(pacing) == 64
    steps(pacing, 8, waited=1)
    assert handed(pacing) == 32
    steps(pacing, 100)
    assert handed(pacing) == 32
    assert pacing.at_most(5, 8) == 5
    retrying = Pacing(batch_groups=16, adaptive=True)
    steps(retrying, 8)
    steps(retrying, 2, waited=2)
    assert handed(retrying) == 1000, "who waits for smaller parts hands out larger ones, and tries again ever later"
    steps(retrying, 15)
    assert handed(retrying) == 1000
    steps(retrying, 1)
    assert handed(retrying) == 64
    always, early, single = aiming(), new(), Pacing(batch_groups=1, adaptive=True)
    steps(always, 50, waited=50)
    steps(early, 50)
    assert handed(always) == handed(early) == 1000
    for _ in range(20):
        assert single.is_whole(1, BOUND, now=0.0)
        single.taken()
    assert handed(single) == 8, "a batch of a group is handed out whole"
