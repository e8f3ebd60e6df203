"""Advantages, overlong rules and the figures of a batch, against plain sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from swarm.learner.advantages import (
    ADVANTAGE_EPSILON,
    TURNS_SHOWN,
    has_variance,
    overlong_punishment,
    returns_of,
    reward_figures,
    rows_of,
    shaped_reward,
    turn_advantages,
)
from swarm.learner.messages import TrainerConfig, TrainGroup, TrainRollout
from swarm.types import Turn
from tests.builders import floats, ints

KEEP, MASK = TrainerConfig(), TrainerConfig(overlong="mask")
PUNISH = TrainerConfig(overlong="punish", longest_completion=10)


def one(tokens: int, reward: float, *, staleness: int = 0, truncated: bool = False) -> TrainRollout:
    token_ids, logprobs = ints(*range(3, 3 + tokens)), floats(*(-1.0 - i for i in range(tokens)))
    return TrainRollout(token_ids, logprobs, reward, staleness, truncated)


def group_of(*rollouts: TrainRollout) -> TrainGroup:
    return TrainGroup(prompt_token_ids=(1, 5, 6), rollouts=rollouts)


def plain_advantages(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (spread + ADVANTAGE_EPSILON) for reward in rewards]


# -- normalisation -----------------------------------------------------------------------------------------------


@given(rewards=st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_advantages_are_those_of_each_group_alone(rewards: list[list[float]]) -> None:
    for group in rewards:
        found = turn_advantages([[reward] for reward in group])
        expected = plain_advantages(group)
        assert [one for (one,) in found or [[0.0]] * 4] == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_rows_keep_what_belongs_to_their_rollout() -> None:
    rows = rows_of([group_of(one(2, 1.0, staleness=3), one(1, 0.0, truncated=True))], KEEP)
    assert [row.token_ids.tolist() for row in rows] == [[1, 5, 6, 3, 4], [1, 5, 6, 3]]
    assert [row.behaviour.tolist() for row in rows] == [[-1.0, -2.0], [-1.0]]
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


def test_the_soft_punishment_is_dapos_and_is_added_to_the_reward() -> None:
    """A straight line over the last fifth."""
    assert [overlong_punishment(n, longest=40) for n in (31, 32, 34, 40, 41)] == [0.0, 0.0, -0.25, -1.0, -1.0]
    # Of few tokens only what is longer than allowed is punished.
    assert [overlong_punishment(n, longest=3) for n in (2, 3, 4)] == [0.0, 0.0, -1.0]
    assert [shaped_reward(one(tokens, 0.5), PUNISH) for tokens in (8, 9, 11)] == [0.5, 0.0, -0.5]
    assert shaped_reward(one(9, 0.5), KEEP) == 0.5


def test_variance_is_that_of_the_punished_rewards() -> None:
    equal_rewards = group_of(one(6, 0.5), one(10, 0.5, truncated=True))
    rows = rows_of([equal_rewards], PUNISH)
    assert [row.advantage for row in rows] == pytest.approx(plain_advantages([0.5, -0.5]), rel=1e-4)
    made_equal = group_of(one(6, 0.0), one(10, 1.0, truncated=True))
    assert has_variance(made_equal, KEEP)
    assert rows_of([made_equal], PUNISH) == []


# -- figures -----------------------------------------------------------------------------------------------------

GROUPS = (group_of(one(3, 1.0, staleness=2), one(1, 0.0)), group_of(one(10, 0.5, truncated=True), one(1, 0.5)))


def test_the_figures_of_a_batch_are_of_the_tasks_rewards_and_the_shaped_one_stands_beside() -> None:
    figures = reward_figures(GROUPS, KEEP)
    assert figures == pytest.approx(
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
    punished = reward_figures(GROUPS, PUNISH)
    assert punished.pop("reward_shaped") == pytest.approx(0.25)
    assert punished == figures | {"frac_reward_zero_std": 0.0}
    cut = reward_figures([group_of(one(6, 0.0, truncated=True), one(6, 1.0, truncated=True))], KEEP)
    assert cut["completions/mean_terminated_length"] == 0.0, "nothing ended by itself"


# -- episodes ----------------------------------------------------------------------------------------------------


def turns(*of: tuple[int, int, float], seat: int = 0, node: str = "") -> tuple[Turn, ...]:
    return tuple(Turn(start=start, end=end, reward=reward, seat=seat, node=node) for start, end, reward in of)


def episode(*of: Turn, seats: tuple[int, ...] = (), truncated: bool = False) -> TrainRollout:
    """Tokens 3, 4, ...: those outside of the turns are the environment's. It ends one token after its last turn."""
    length = max(turn.end for turn in of) + 1
    drawn = {place for turn in of for place in range(turn.start, turn.end)}
    return TrainRollout(
        token_ids=ints(*range(3, 3 + length)),
        logprobs=floats(*(-1.0 - i if i in drawn else 0.0 for i in range(length))),
        reward=sum(turn.reward for turn in of if turn.seat == 0),
        staleness=0,
        truncated=truncated,
        sampler="last",
        turns=of,
        seats=seats,
    )


BY_TURN = TrainerConfig(task="frozen-lake", credit="turn")


def test_only_what_was_drawn_counts_in_the_row_of_an_episode() -> None:
    group = group_of(episode(*turns((0, 2, 0.0), (4, 5, 1.0))), episode(*turns((1, 3, 0.0))))
    first, second = rows_of([group], KEEP)
    assert first.token_ids.tolist() == [1, 5, 6, 3, 4, 5, 6, 7], "nothing after its last word"
    assert first.places.tolist() == [3, 4, 7]
    assert first.behaviour.tolist() == [-1.0, -2.0, -5.0]
    assert (second.places.tolist(), second.behaviour.tolist()) == ([4, 5], [-2.0, -3.0])
    assert [first.advantage, second.advantage] == pytest.approx([1.0, -1.0], rel=1e-3)


def test_each_player_has_a_row_of_its_own_and_is_compared_with_itself() -> None:
    """The first player wins once, the second always loses the same."""
    one = episode(*turns((0, 2, 1.0)), *turns((5, 7, -1.0), seat=1, node="b"), seats=(0, 4))
    two = episode(*turns((0, 1, 0.0)), *turns((3, 5, -1.0), seat=1), seats=(0, 2))
    rows = rows_of([group_of(one, two)], KEEP)
    assert [row.token_ids.tolist() for row in rows] == [[1, 5, 6, 3, 4], [1, 5, 6, 3]], (
        "nothing to learn for the second"
    )
    three = episode(*turns((0, 1, 0.0)), *turns((2, 3, 3.0), seat=1), seats=(0, 1))
    *_, last, other = rows_of([group_of(one, three)], KEEP)
    assert (last.token_ids.tolist(), last.places.tolist(), last.prompt_tokens) == ([7, 8, 9], [1, 2], 1)
    assert (other.token_ids.tolist(), other.places.tolist(), last.samplers) == ([4, 5], [1], ("b",))
    assert [last.advantage, other.advantage] == pytest.approx([-1.0, 1.0], rel=1e-3)


@pytest.mark.parametrize("rules", [KEEP, BY_TURN])
def test_an_episode_of_one_turn_is_a_completion(rules: TrainerConfig) -> None:
    plain = (one(2, 1.0), one(3, 0.0))
    whole = [structs.replace(own, turns=turns((0, own.length, own.reward))) for own in plain]
    assert list(map(str, rows_of([group_of(*plain)], rules))) == list(map(str, rows_of([group_of(*whole)], rules)))


def test_a_player_that_never_spoke_has_no_row() -> None:
    quiet = episode(*turns((0, 2, 0.0)), seats=(0, 2))
    rows = rows_of([group_of(quiet, episode(*turns((0, 1, 1.0)), *turns((2, 3, 1.0), seat=1), seats=(0, 1)))], KEEP)
    assert [len(row.token_ids) for row in rows] == [5, 4]


ONE = TrainerConfig(task="agent:play.py:play")


def two_streams(reward: float, first: float = 0.0) -> TrainRollout:
    """An episode of a program with two conversations, each with the whole reward."""
    streams = (*turns((1, 2, first), (3, 4, reward - first), seat=1), *turns((5, 6, reward), seat=2))
    return structs.replace(episode(*streams, seats=(0, 0, 4)), reward=reward)


def test_the_conversations_of_one_program_have_the_advantage_of_their_episode() -> None:
    """Of three episodes two forked; the mean counts each once, and a stream that no other has is compared too."""
    alone = structs.replace(episode(*turns((1, 2, 1.0), seat=1), seats=(0, 0)), reward=1.0)
    group = group_of(two_streams(0.0), alone, two_streams(0.5))
    low, high, middle = plain_advantages([0.0, 1.0, 0.5])
    found = [float(torch.as_tensor(row.advantage).flatten()[0]) for row in rows_of([group], ONE)]
    assert found == pytest.approx([low, low, high, middle, middle])
    assert not has_variance(group_of(two_streams(0.5), structs.replace(alone, reward=0.5)), ONE)


def test_with_credit_by_turn_each_conversation_has_its_own_turns_and_all_are_compared() -> None:
    by_turn = TrainerConfig(task="agent:play.py:play", credit="turn", turn_discount=1.0)
    group = group_of(two_streams(1.0, 0.25), two_streams(0.0))
    rows = rows_of([group], by_turn)
    assert len(rows) == 4
    expected = turn_advantages([[1.0, 0.75], [1.0], [0.0, 0.0], [0.0]])
    assert expected is not None
    found = [float(torch.as_tensor(row.advantage).flatten()[0]) for row in rows]
    assert found == pytest.approx([own[0] for own in expected])


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
def test_a_turn_is_credited_with_what_follows_it(discount: float) -> None:
    """Of three episodes; a third turn has one of them alone, which is compared with all turns."""
    rewards = [(0.0, 1.0), (0.5, 0.0), (0.0, 0.25, 1.0)]
    group = group_of(*(episode(*turns(*((3 * n, 3 * n + 2, r) for n, r in enumerate(own)))) for own in rewards))
    rows = rows_of([group], TrainerConfig(task="frozen-lake", credit="turn", turn_discount=discount))
    returns = [[sum(discount**n * r for n, r in enumerate(own[k:])) for k in range(len(own))] for own in rewards]
    every = [one for own in returns for one in own]
    mean = sum(every) / len(every)
    spread = math.sqrt(sum((one - mean) ** 2 for one in every) / len(every)) + ADVANTAGE_EPSILON
    means = [sum(own[k] for own in returns) / 3 for k in range(2)] + [mean]
    for number, row in enumerate(rows):
        assert isinstance(row.advantage, torch.Tensor)
        expected = [(one - means[k]) / spread for k, one in enumerate(returns[number])]
        assert row.advantage.tolist() == pytest.approx([one for one in expected for _ in range(2)], rel=1e-4)


def test_equal_returns_may_have_come_about_differently() -> None:
    early, late = episode(*turns((0, 1, 1.0), (2, 3, 0.0))), episode(*turns((0, 1, 0.0), (2, 3, 1.0)))
    group = group_of(early, late)
    assert rows_of([group], KEEP) == []
    first, second = rows_of([group], BY_TURN)
    assert isinstance(first.advantage, torch.Tensor)
    assert isinstance(second.advantage, torch.Tensor)
    worth = 0.5 / math.sqrt(3 / 16)
    assert first.advantage.tolist() == pytest.approx([0.0, -worth], abs=1e-3), (
        "its first turn was worth what is to come"
    )
    assert second.advantage.tolist() == pytest.approx([0.0, worth], abs=1e-3)
    assert not has_variance(group_of(early, early), BY_TURN)


def test_an_episode_that_reached_a_limit_is_masked_or_punished_however_little_of_it_was_drawn() -> None:
    long = episode(*turns((0, 4, 0.5), (20, 25, 0.5)), truncated=True)
    short = episode(*turns((0, 2, 1.0), (20, 22, 0.0)))
    assert not has_variance(group_of(long, short), MASK)
    assert shaped_reward(long, PUNISH) == 0.0
    assert shaped_reward(short, PUNISH) == 1.0
    by_turn = TrainerConfig(task="frozen-lake", credit="turn", overlong="punish", longest_completion=10)
    assert returns_of(long, by_turn, 0) == [0.0, -0.5]


def test_episodes_have_figures_of_their_own() -> None:
    one = episode(*turns((0, 2, 0.25), (4, 5, 1.0)), truncated=True)
    figures = reward_figures([group_of(one, episode(*turns((1, 3, 0.0))))], KEEP)
    assert {name: value for name, value in figures.items() if name.startswith("episode/")} == pytest.approx(
        {
            "episode/turns/mean": 1.5,
            "episode/turn_tokens/mean": 5 / 3,
            "episode/limit_share": 0.5,
            "episode/drawn_share": 5 / 10,
            "episode/reward/turn_1": 0.125,
            "episode/reward/turn_2": 1.0,
        }
    )
    assert (figures["completions/mean_length"], figures["completions/max_length"]) == (2.5, 3.0)
    many = episode(*turns(*((2 * n, 2 * n + 1, 0.0) for n in range(20))))
    assert (
        sum(name.startswith("episode/reward/") for name in reward_figures([group_of(many, one)], KEEP)) == TURNS_SHOWN
    )
