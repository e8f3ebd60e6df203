"""From the rewards of groups to the rows that teach: shaped rewards, advantages, and the batch's figures."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from swarm.learner.batch import Row
from swarm.learner.messages import LearningRules, TrainGroup, TrainRollout

ADVANTAGE_EPSILON = 1e-4
"""Keeps a group of nearly equal rewards from dividing by nearly zero; TRL's value."""


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + eps) over each group; shape [groups, samples]. GRPO, arXiv 2402.03300, section 4.1.

    A group without variance gets zeros, so it moves nothing.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + ADVANTAGE_EPSILON)


def rows_of(groups: Sequence[TrainGroup], rules: LearningRules) -> list[Row]:
    """Every rollout of the groups that have any variance, in order."""
    rows: list[Row] = []
    for group in groups:
        if has_variance(group):
            rewards = torch.tensor([[rollout.reward for rollout in group.rollouts]], dtype=torch.float32)
            advantages = group_advantages(rewards)[0].tolist()
            pairs = zip(group.rollouts, advantages, strict=True)
            rows += [_row(group.prompt_token_ids, rollout, advantage) for rollout, advantage in pairs]
    return rows


def has_variance(group: TrainGroup) -> bool:
    """False if every rollout got the same reward: such a group teaches nothing and is left out of the step."""
    return len({rollout.reward for rollout in group.rollouts}) > 1


def reward_figures(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """The batch's figures that need no model, by TRL's names."""
    rewards = torch.tensor([[r.reward for r in group.rollouts] for group in groups])
    spread = rewards.std(dim=1, correction=0)
    lengths = [len(r.loss_mask) for group in groups for r in group.rollouts]
    ages = [r.staleness for group in groups for r in group.rollouts]
    return {
        "reward": rewards.mean().item(),
        "reward_std": spread.mean().item(),
        "frac_reward_zero_std": (spread < 1e-8).float().mean().item(),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/max_length": float(max(lengths)),
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": float(max(ages)),
    }


def _row(prompt: tuple[int, ...], rollout: TrainRollout, advantage: float) -> Row:
    return Row(
        token_ids=torch.tensor([*prompt, *array("i", rollout.token_ids)], dtype=torch.long),
        prompt_tokens=len(prompt),
        behaviour=torch.tensor(array("f", rollout.logprobs)),
        mask=torch.tensor(list(rollout.loss_mask), dtype=torch.float32),
        advantage=advantage,
        staleness=rollout.staleness,
        truncated=rollout.truncated,
    )
