"""What a learner step makes smaller. A new objective is one function here, under its name in OBJECTIVES.

Every formula is in docs/learner.md as it is coded, with its source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarm.learner.messages import LearningRules

RATIO_CAP = 10.0
"""Largest importance ratio, on both signs of the advantage. min() leaves the ratio of a bad token unbounded, and
behaviour log-probs are claims of samplers: one of -10,000 would make every weight NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Completion tokens of a micro-batch: [tokens] each. `proximal` is there for objectives that ask for it."""

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    proximal: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of every token, [tokens], before masking; `figures` are sums over the tokens that count."""

    loss: torch.Tensor
    figures: dict[str, torch.Tensor]


Objective = Callable[[Tokens, LearningRules], TokenLoss]


def grpo(tokens: Tokens, rules: LearningRules) -> TokenLoss:
    """-min(ratio * A, clip(ratio) * A), with ratio = min(pi / behaviour, RATIO_CAP). GRPO with DAPO's clip."""
    counts = tokens.mask.bool()
    # Masked and capped before exp: an infinity times a mask of zero would be NaN.
    log_ratio = torch.where(counts, tokens.logprobs - tokens.behaviour, 0.0)
    ratio = log_ratio.clamp(max=math.log(RATIO_CAP)).exp()
    bounded = ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    low = (ratio < 1 - rules.clip_low) & (tokens.advantages < 0) & counts
    high = (ratio > 1 + rules.clip_high) & (tokens.advantages > 0) & counts
    return TokenLoss(
        loss=-torch.minimum(ratio * tokens.advantages, bounded * tokens.advantages),
        figures={
            "clip_ratio/low_mean": low.sum(),
            "clip_ratio/high_mean": high.sum(),
            "sampling/importance_sampling_ratio/mean": (ratio.detach() * tokens.mask).sum(),
        },
    )


OBJECTIVES: dict[str, Objective] = {"grpo": grpo}

WANT_PROXIMAL: frozenset[str] = frozenset()
"""Objectives that need the log-probs of the policy as it was at the start of the step."""
