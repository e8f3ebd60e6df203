"""Token-level GRPO: group-normalised advantages, clipped importance ratio against the behaviour log-probs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CLIP_LOW = 0.2
CLIP_HIGH = 0.28
"""Asymmetric clip of DAPO (arXiv 2503.14476): rare tokens may rise further than frequent ones may fall."""

RATIO_CAP = 10.0
"""Largest importance ratio, on both signs of the advantage. min() leaves the ratio of a bad token unbounded, and
behaviour log-probs are claims of samplers: one of -10,000 would make every weight NaN."""

ADVANTAGE_EPSILON = 1e-4
"""Keeps a group of nearly equal rewards from dividing by nearly zero; TRL's value."""


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + eps) over each group; shape [groups, samples]. GRPO, arXiv 2402.03300, section 4.1.

    A group without variance gets zeros, so it moves nothing.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + ADVANTAGE_EPSILON)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss:
    """The loss of a micro-batch, and sums over its tokens for the step's figures."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    ratio_sum: torch.Tensor


def clipped_loss(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    tokens_in_batch: torch.Tensor | float,
) -> ClippedLoss:
    """-sum(mask * min(ratio * A, clip(ratio) * A)) / tokens_in_batch, with ratio = min(pi / behaviour, RATIO_CAP).

    logprobs, behaviour_logprobs, mask: [rows, tokens]; advantages: [rows]. Dividing by the tokens of the whole
    batch makes every token count the same (DAPO's token-level loss), however the batch is cut.
    """
    weight = advantages.unsqueeze(1)
    # Masked and capped before exp: an infinity times a mask of zero would be NaN.
    log_ratio = torch.where(mask.bool(), logprobs - behaviour_logprobs, 0.0)
    ratio = log_ratio.clamp(max=math.log(RATIO_CAP)).exp()
    bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    per_token = -torch.minimum(ratio * weight, bounded * weight)
    return ClippedLoss(
        loss=(per_token * mask).sum() / tokens_in_batch,
        clipped_low=((ratio < 1 - CLIP_LOW) & (weight < 0) & mask.bool()).sum(),
        clipped_high=((ratio > 1 + CLIP_HIGH) & (weight > 0) & mask.bool()).sum(),
        ratio_sum=(ratio.detach() * mask).sum(),
    )
