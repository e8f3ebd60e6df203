"""Groups of rollouts as padded tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.learner.messages import TrainGroup
from swarm.learner.objective import group_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of prompt + completion, padded on the right.

    token_ids, attention: [rows, width]; behaviour, mask: [rows, width - 1], aligned with the token that position
    t predicts (t + 1); advantages, staleness: [rows].
    """

    token_ids: torch.Tensor
    attention: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    staleness: torch.Tensor

    def rows(self, places: torch.Tensor) -> Batch:
        """The rows at `places`."""
        return Batch(
            token_ids=self.token_ids[places],
            attention=self.attention[places],
            behaviour=self.behaviour[places],
            mask=self.mask[places],
            advantages=self.advantages[places],
            staleness=self.staleness[places],
        )


def collate(groups: Sequence[TrainGroup], device: torch.device) -> Batch:
    """One batch of all rollouts of all groups, in order."""
    rewards = torch.tensor([[r.reward for r in group.rollouts] for group in groups], dtype=torch.float32)
    pairs = [(group.prompt_token_ids, rollout) for group in groups for rollout in group.rollouts]
    width = max(len(prompt) + len(rollout.loss_mask) for prompt, rollout in pairs)
    token_ids = torch.zeros((len(pairs), width), dtype=torch.long)
    attention = torch.zeros((len(pairs), width), dtype=torch.long)
    behaviour = torch.zeros((len(pairs), width - 1))
    mask = torch.zeros((len(pairs), width - 1))
    for row, (prompt, rollout) in enumerate(pairs):
        start, end = len(prompt), len(prompt) + len(rollout.loss_mask)
        token_ids[row, :start] = torch.tensor(prompt)
        token_ids[row, start:end] = torch.tensor(array("i", rollout.token_ids))
        attention[row, :end] = 1
        behaviour[row, start - 1 : end - 1] = torch.tensor(array("f", rollout.logprobs))
        mask[row, start - 1 : end - 1] = torch.tensor(list(rollout.loss_mask))
    return Batch(
        token_ids=token_ids.to(device),
        attention=attention.to(device),
        behaviour=behaviour.to(device),
        mask=mask.to(device),
        advantages=group_advantages(rewards).reshape(-1).to(device),
        staleness=torch.tensor([rollout.staleness for _, rollout in pairs], device=device),
    )


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
