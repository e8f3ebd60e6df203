"""From the rewards of groups to the rows that teach: shaped rewards, advantages, and the batch's figures."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import torch

from swarm.learner.batch import Row
from swarm.learner.messages import LearningRules, TrainGroup, TrainRollout

ADVANTAGE_EPSILON = 1e-4
"""Keeps a group of nearly equal rewards from dividing by nearly zero; TRL's value."""


def group_advantages(rewards: torch.Tensor, normalisation: Literal["group", "none"] = "group") -> torch.Tensor:
    """(r - mean) / (std + eps) over each group, or r - mean; shape [groups, samples].

    GRPO, arXiv 2402.03300, section 4.1.2; without the division Dr. GRPO, arXiv 2503.20783. The std is that of the group
    as a population. A group without variance gets zeros, so it moves nothing.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if normalisation == "none":
        return centred
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + ADVANTAGE_EPSILON)


def overlong_punishment(tokens: int, *, longest: int, margin: int) -> float:
    """Soft overlong punishment of a completion of so many tokens, from 0 down to -1 at `longest`.

    DAPO, arXiv 2503.14476, equation 13.
    """
    if tokens <= longest - margin:
        return 0.0
    if tokens <= longest:
        return (longest - margin - tokens) / margin
    return -1.0


def shaped_reward(rollout: TrainRollout, rules: LearningRules) -> float:
    """What the advantages are made of."""
    if rules.overlong != "punish":
        return rollout.reward
    length = len(rollout.loss_mask)
    return rollout.reward + overlong_punishment(length, longest=rules.longest_completion, margin=rules.overlong_margin)


def rows_of(groups: Sequence[TrainGroup], rules: LearningRules) -> list[Row]:
    """The rollouts that teach of the groups that have any variance, in order."""
    rows: list[Row] = []
    for group in groups:
        if has_variance(group, rules):
            rollouts = _teaching(group, rules)
            rewards = torch.tensor([[shaped_reward(rollout, rules) for rollout in rollouts]], dtype=torch.float32)
            advantages = group_advantages(rewards, rules.advantage_normalisation)[0].tolist()
            pairs = zip(rollouts, advantages, strict=True)
            rows += [_row(group.prompt_token_ids, rollout, advantage) for rollout, advantage in pairs]
    return rows


def has_variance(group: TrainGroup, rules: LearningRules) -> bool:
    """False if all rollouts that teach have the same shaped reward: such a group is left out of the step."""
    return len({shaped_reward(rollout, rules) for rollout in _teaching(group, rules)}) > 1


def reward_figures(groups: Sequence[TrainGroup], rules: LearningRules) -> dict[str, float]:
    """The batch's figures that need no model, by TRL's names. `reward` is the task's, whatever shapes it."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.tensor([[rollout.reward for rollout in group.rollouts] for group in groups])
    ages = [rollout.staleness for rollout in rollouts]
    figures = {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(dim=1, correction=0).mean().item(),
        "frac_reward_zero_std": sum(not has_variance(group, rules) for group in groups) / len(groups),
        **_length_figures(rollouts),
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": float(max(ages)),
    }
    if rules.overlong == "punish":
        figures["reward_shaped"] = sum(shaped_reward(rollout, rules) for rollout in rollouts) / len(rollouts)
    return figures


def _length_figures(rollouts: Sequence[TrainRollout]) -> dict[str, float]:
    """In tokens. `terminated` are those that ended by themselves; 0 if none did."""
    lengths = [len(rollout.loss_mask) for rollout in rollouts]
    terminated = [len(rollout.loss_mask) for rollout in rollouts if not rollout.truncated]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(terminated) / len(rollouts),
        "completions/mean_terminated_length": sum(terminated) / max(1, len(terminated)),
    }


def _teaching(group: TrainGroup, rules: LearningRules) -> list[TrainRollout]:
    """The rollouts that carry loss. One that is masked is not in the group's mean either: a reward that says nothing
    should not move the others' advantages."""
    return [rollout for rollout in group.rollouts if not (rules.overlong == "mask" and rollout.truncated)]


def _row(prompt: tuple[int, ...], rollout: TrainRollout, advantage: float) -> Row:
    return Row(
        token_ids=torch.tensor([*prompt, *array("i", rollout.token_ids)], dtype=torch.long),
        prompt_tokens=len(prompt),
        behaviour=torch.tensor(array("f", rollout.logprobs)),
        mask=torch.tensor(list(rollout.loss_mask), dtype=torch.float32),
        advantage=advantage,
        staleness=rollout.staleness,
        sampler=rollout.sampler,
    )
