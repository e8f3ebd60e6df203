"""Advantages, overlong rules and the figures of a batch, against plain sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.learner.messages import LearningRules, TrainGroup, TrainRollout
from swarm.learner.update import (
    ADVANTAGE_EPSILON,
    group_advantages,
    has_variance,
    overlong_punishment,
    reward_figures,
    rows_of,
    shaped_reward,
)
from tests.builders import floats, ints

KEEP, MASK = LearningRules(), LearningRules(overlong="mask")
PUNISH = LearningRules(overlong="punish", longest_completion=10, overlong_margin=4)


def one(tokens: int, reward: float, *, staleness: int = 0, truncated: bool = False) -> TrainRollout:
    return TrainRollout(
        token_ids=ints(*range(3, 3 + tokens)),
        logprobs=floats(*(-1.0 - i for i in range(tokens))),
        reward=reward,
        staleness=staleness,
        truncated=truncated,
    )


def group_of(*rollouts: TrainRollout) -> TrainGroup:
    return TrainGroup(prompt_token_ids=(1, 5, 6), rollouts=rollouts)


def plain_advantages(rewards: Sequence[float], normalisation: str = "group") -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (spread + ADVANTAGE_EPSILON if normalisation == "group" else 1) for reward in rewards]


# -- normalisation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalisation", ["group", "none"])
@given(rewards=st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_advantages_are_those_of_each_group_alone(
    normalisation: Literal["group", "none"], rewards: list[list[float]]
) -> None:
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), normalisation)
    for row, group in zip(found.tolist(), rewards, strict=True):
        assert row == pytest.approx(plain_advantages(group, normalisation), rel=1e-6, abs=1e-8)


def test_dividing_by_the_spread_makes_easy_and_hard_groups_weigh_alike_and_without_it_they_do_not() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    assert group_advantages(rewards).square().sum(1).tolist() == pytest.approx([4.0, 4.0], rel=1e-3)
    assert group_advantages(rewards, "none").square().sum(1).tolist() == pytest.approx([0.75, 1.0])


@pytest.mark.parametrize(("normalisation", "expected"), [("group", [1.0, -1.0]), ("none", [0.25, -0.25])])
def test_the_rule_decides_what_the_rows_get(normalisation: Literal["group", "none"], expected: list[float]) -> None:
    rows = rows_of([group_of(one(2, 0.75), one(3, 0.25))], LearningRules(advantage_normalisation=normalisation))
    assert [row.advantage for row in rows] == pytest.approx(expected, abs=1e-3)


# -- groups that teach -------------------------------------------------------------------------------------------


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    groups = [group_of(one(1, 0.5), one(2, 0.5)), group_of(one(3, 0.5), one(4, 0.0))]
    assert [has_variance(group, KEEP) for group in groups] == [False, True]
    assert [len(row.behaviour) for row in rows_of(groups, KEEP)] == [3, 4]


def test_rows_keep_what_belongs_to_their_rollout() -> None:
    rows = rows_of([group_of(one(2, 1.0, staleness=3), one(1, 0.0, truncated=True))], KEEP)
    assert [row.token_ids.tolist() for row in rows] == [[1, 5, 6, 3, 4], [1, 5, 6, 3]]
    assert [row.behaviour.tolist() for row in rows] == [[-1.0, -2.0], [-1.0]]
    assert [row.mask.tolist() for row in rows] == [[1.0, 1.0], [1.0]]
    assert [(row.prompt_tokens, row.staleness) for row in rows] == [(3, 3), (3, 0)]


# -- overlong: mask ----------------------------------------------------------------------------------------------


def test_a_masked_rollout_has_no_row_and_no_part_in_the_mean() -> None:
    group = group_of(one(2, 1.0), one(6, 0.0, truncated=True), one(3, 0.5), one(6, 0.9, truncated=True))
    rows = rows_of([group], MASK)
    assert [len(row.behaviour) for row in rows] == [2, 3]
    assert [row.advantage for row in rows] == pytest.approx(plain_advantages([1.0, 0.5]), rel=1e-4)
    kept = rows_of([group], KEEP)
    assert [row.advantage for row in kept] == pytest.approx(plain_advantages([1.0, 0.0, 0.5, 0.9]), rel=1e-4)


@pytest.mark.parametrize(
    "rollouts",
    [
        (one(2, 1.0), one(3, 1.0), one(6, 0.0, truncated=True)),
        (one(2, 1.0), one(6, 0.0, truncated=True)),
        (one(6, 1.0, truncated=True), one(6, 0.0, truncated=True)),
    ],
)
def test_a_group_without_variance_among_what_is_left_is_not_trained_on(rollouts: tuple[TrainRollout, ...]) -> None:
    group = group_of(*rollouts)
    assert has_variance(group, KEEP)
    assert not has_variance(group, MASK)
    assert rows_of([group], MASK) == []
    assert reward_figures([group], MASK)["frac_reward_zero_std"] == 1.0


# -- overlong: punish --------------------------------------------------------------------------------------------


def plain_punishment(tokens: int, longest: int, margin: int) -> float:
    """A straight line from (longest - margin, 0) to (longest, -1), level outside."""
    into = max(0, min(tokens, longest) - (longest - margin))
    return -1.0 if tokens > longest else -into / margin


@given(longest=st.integers(1, 40), data=st.data())
def test_the_soft_punishment_is_dapos(longest: int, data: st.DataObject) -> None:
    margin = data.draw(st.integers(1, longest))
    for tokens in range(longest + 3):
        found = overlong_punishment(tokens, longest=longest, margin=margin)
        assert found == pytest.approx(plain_punishment(tokens, longest, margin))


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0.0), (6, 0.0), (7, -0.25), (9, -0.75), (10, -1.0), (11, -1.0)])
def test_the_punishment_is_added_to_the_reward(tokens: int, expected: float) -> None:
    assert shaped_reward(one(tokens, 0.5), PUNISH) == 0.5 + expected
    assert shaped_reward(one(tokens, 0.5), KEEP) == 0.5


def test_without_a_margin_only_what_is_longer_than_allowed_is_punished() -> None:
    assert [overlong_punishment(n, longest=3, margin=0) for n in (2, 3, 4)] == [0.0, 0.0, -1.0]


def test_variance_is_that_of_the_punished_rewards() -> None:
    equal_rewards = group_of(one(6, 0.5), one(10, 0.5, truncated=True))
    rows = rows_of([equal_rewards], PUNISH)
    assert [row.advantage for row in rows] == pytest.approx(plain_advantages([0.5, -0.5]), rel=1e-4)
    made_equal = group_of(one(6, 0.0), one(10, 1.0, truncated=True))
    assert has_variance(made_equal, KEEP)
    assert rows_of([made_equal], PUNISH) == []


# -- figures -----------------------------------------------------------------------------------------------------

GROUPS = (
    group_of(one(3, 1.0, staleness=2), one(1, 0.0)),
    group_of(one(10, 0.5, truncated=True), one(1, 0.5)),
)


def test_the_figures_of_a_batch_need_no_model() -> None:
    assert reward_figures(GROUPS, KEEP) == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": 0.25,
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 15 / 4,
            "completions/min_length": 1.0,
            "completions/max_length": 10.0,
            "completions/clipped_ratio": 0.25,
            "completions/mean_terminated_length": 5 / 3,
            "staleness/mean": 0.5,
            "staleness/max": 2.0,
        }
    )


def test_the_reward_stays_the_tasks_and_the_shaped_one_stands_beside_it() -> None:
    plain, punished = reward_figures(GROUPS, KEEP), reward_figures(GROUPS, PUNISH)
    assert punished.pop("reward_shaped") == pytest.approx(0.25)
    assert punished == plain | {"frac_reward_zero_std": 0.0}


def test_a_batch_in_which_nothing_ended_by_itself_has_figures() -> None:
    figures = reward_figures([group_of(one(6, 0.0, truncated=True), one(6, 1.0, truncated=True))], KEEP)
    assert figures["completions/clipped_ratio"] == 1.0
    assert figures["completions/mean_terminated_length"] == 0.0
