"""A run that learns nothing says so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from swarm.lead.signal import FLAT_GROUPS, FLAT_STEPS, FLOOR_STEPS, LearningSignal, rewards_failed
from swarm.rollout.plane.groups import Group
from swarm.types import Score
from tests.builders import ready_group

FLAT = {"frac_reward_zero_std": 1.0}


def group(rewards: Sequence[float], *, exact: bool = False) -> Group:
    found = ready_group(0, 0, samples=len(rewards))
    for sample, reward in zip(found.samples, rewards, strict=True):
        sample.score = Score(reward=reward, exact=exact)
    return found


def test_steps_without_variance_go_off_after_some_of_them() -> None:
    signal, batch = LearningSignal(), [group([0.0, 0.0])] * FLAT_GROUPS
    for _ in range(FLAT_STEPS - 1):
        assert signal.stepped(batch, FLAT) is None
    alarm = signal.stepped(batch, FLAT)
    assert alarm is not None
    assert (alarm.kind, alarm.reaction, alarm.value) == ("no_variance", "none", FLAT_STEPS)
    assert "no group of the last 5 steps had two different rewards" in alarm.text
    assert signal.stepped(batch, {"frac_reward_zero_std": 0.99}) is None
    assert signal.stepped(batch, FLAT) is None, "one group that teaches begins the count again"
    small = LearningSignal()
    raised = [small.stepped([group([1.0, 1.0])], FLAT) is not None for _ in range(FLAT_GROUPS)]
    assert raised == [False] * (FLAT_GROUPS - 1) + [True], "of small batches more steps are waited for"


@pytest.mark.parametrize(("low", "high", "kind"), [(199, 1, "reward_floor"), (190, 10, None)])
def test_rewards_at_their_lowest_go_off(low: int, high: int, kind: str | None) -> None:
    signal, batch = LearningSignal(), [group([-1.0] * low + [0.5] * high)]
    raised = [signal.stepped(batch, {"frac_reward_zero_std": 0.5}) for _ in range(FLOOR_STEPS)]
    assert raised[:-1] == [None] * (FLOOR_STEPS - 1)
    assert (raised[-1].kind if raised[-1] else None) == kind


@pytest.mark.parametrize(("before", "then"), [([-1.0, 0.0], group([0.0] * 200)), ([], group([1.0] * 200, exact=True))])
def test_rewards_that_were_lower_before_or_are_of_solved_completions_are_not_at_their_lowest(
    before: list[float], then: Group
) -> None:
    signal = LearningSignal()
    signal.stepped([group(before)], {})
    assert [signal.stepped([then], {}) for _ in range(2 * FLOOR_STEPS)] == [None] * 2 * FLOOR_STEPS


def test_rewards_that_fail_now_and_then_are_an_alarm() -> None:
    assert rewards_failed(0.01, "it hung") is None
    alarm = rewards_failed(0.02, "it hung")
    assert alarm is not None
    assert (alarm.kind, alarm.reaction) == ("reward_failed", "none")
    assert alarm.text.startswith("2.0% of the rewards failed")
    assert alarm.text.endswith("Last: it hung")
