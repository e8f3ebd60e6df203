"""What a learner step makes smaller. A new objective is one function here, under @objective, and its name in
types.ObjectiveName.

Every formula is in docs/learner.md as it is coded, with its source. Behaviour log-probs are claims of untrusted
samplers, so no finite claim may make anything infinite or NaN: tokens that do not count are masked and every ratio is
capped before exp, since an infinity times a mask of zero would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarm.learner.messages import LearningRules

# For both signs of the advantage, since min() alone leaves the ratio of a bad token unbounded. Far outside any clip in
# use, so that it binds only on absurd claims.
RATIO_CAP = 10.0
# Of truncated importance sampling: the low end of what is in use, since the weights come from claims. It biases each
# token beyond it, and each weight above it would add variance.
WEIGHT_CAP = 2.0

ICEPOP_LOW, ICEPOP_HIGH = 0.5, 5.0  # Outside this band of proximal / behaviour icepop drops a token, as in its paper


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Completion tokens of a micro-batch: [tokens] each. `proximal` is there for objectives that ask for it."""

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    proximal: torch.Tensor | None = None

    @property
    def counts(self) -> torch.Tensor:
        return self.mask.bool()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of every token, [tokens], before masking; `figures` are sums over the tokens that count."""

    loss: torch.Tensor
    figures: dict[str, torch.Tensor]


Formula = Callable[[Tokens, LearningRules], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A formula, and whether it needs the log-probs of the policy at the start of the learner step: one more forward
    pass over the batch."""

    formula: Formula
    wants_proximal: bool


OBJECTIVES: dict[str, Objective] = {}  # By the name that `--objective` takes, see types.ObjectiveName


def objective(*, wants_proximal: bool = False) -> Callable[[Formula], Formula]:

    def register(formula: Formula) -> Formula:
        OBJECTIVES[formula.__name__] = Objective(formula=formula, wants_proximal=wants_proximal)
        return formula

    return register


# -- objectives --------------------------------------------------------------------------------------------------


@objective()
def grpo(tokens: Tokens, rules: LearningRules) -> TokenLoss:
    """-min(r A, clip(r) A), with r = min(pi / behaviour, RATIO_CAP).

    GRPO (arXiv 2402.03300, equation 3) with DAPO's asymmetric clip (arXiv 2503.14476, equation 8).
    """
    ratio = _ratio(tokens.logprobs, tokens.behaviour, tokens.counts)
    gain, figures = _clipped(ratio, tokens, rules)
    return TokenLoss(loss=-gain, figures=figures | _weight_figure(ratio, tokens))


@objective(wants_proximal=True)
def decoupled_ppo(tokens: Tokens, rules: LearningRules) -> TokenLoss:
    """-w min(r A, clip(r) A), with r = min(pi / proximal, RATIO_CAP) and w = min(proximal / behaviour, WEIGHT_CAP).

    Hilton et al. (arXiv 2110.00641), AReaL (arXiv 2505.24298); truncated here.
    """
    weight = _ratio(_proximal(tokens), tokens.behaviour, tokens.counts, cap=WEIGHT_CAP)
    gain, figures = _clipped(_ratio(tokens.logprobs, _proximal(tokens), tokens.counts), tokens, rules)
    return TokenLoss(loss=-weight * gain, figures=figures | _weight_figure(weight, tokens))


@objective(wants_proximal=True)
def icepop(tokens: Tokens, rules: LearningRules) -> TokenLoss:
    """decoupled_ppo with w = proximal / behaviour where that is in [ICEPOP_LOW, ICEPOP_HIGH], and 0 elsewhere.

    Ring-1T (arXiv 2510.18855).
    """
    found = _ratio(_proximal(tokens), tokens.behaviour, tokens.counts)
    inside = (found >= ICEPOP_LOW) & (found <= ICEPOP_HIGH)
    weight = torch.where(inside, found, 0.0)
    gain, figures = _clipped(_ratio(tokens.logprobs, _proximal(tokens), tokens.counts), tokens, rules)
    figures["sampling/masked_ratio"] = (~inside & tokens.counts).sum()
    return TokenLoss(loss=-weight * gain, figures=figures | _weight_figure(weight, tokens))


@objective()
def cispo(tokens: Tokens, rules: LearningRules) -> TokenLoss:
    """-w A log pi, with w = min(pi / behaviour, 1 + clip_high) held constant.

    MiniMax-M1 (arXiv 2506.13585, section 3.1), whose lower clip never binds.
    """
    return _weighted_log_prob(tokens, cap=1 + rules.clip_high)


@objective()
def tis(tokens: Tokens, rules: LearningRules) -> TokenLoss:
    """-w A log pi, with w = min(pi / behaviour, WEIGHT_CAP) held constant: importance sampling, truncated, no clip.

    As AIPO in LlamaRL (arXiv 2505.24034).
    """
    return _weighted_log_prob(tokens, cap=WEIGHT_CAP)


def kl_to_reference(logprobs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = min(log(reference / pi), log RATIO_CAP): [tokens]; 0 where a token does not count.

    Schulman's estimator k3 of KL(pi, reference), equation 4 of GRPO (arXiv 2402.03300).
    """
    log_ratio = torch.where(mask.bool(), reference - logprobs, 0.0).clamp(max=math.log(RATIO_CAP))
    return torch.expm1(log_ratio) - log_ratio


# -- parts -------------------------------------------------------------------------------------------------------


def _ratio(of: torch.Tensor, to: torch.Tensor, counts: torch.Tensor, *, cap: float = RATIO_CAP) -> torch.Tensor:
    """min(exp(of - to), cap), without a gradient beyond it; 1 where a token does not count."""
    return torch.where(counts, of - to, 0.0).clamp(max=math.log(cap)).exp()


def _clipped(ratio: torch.Tensor, tokens: Tokens, rules: LearningRules) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """min(r A, clip(r) A), and on how many tokens either clip binds."""
    bounded = ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    low = (ratio < 1 - rules.clip_low) & (tokens.advantages < 0) & tokens.counts
    high = (ratio > 1 + rules.clip_high) & (tokens.advantages > 0) & tokens.counts
    gain = torch.minimum(ratio * tokens.advantages, bounded * tokens.advantages)
    return gain, {"clip_ratio/low_mean": low.sum(), "clip_ratio/high_mean": high.sum()}


def _weighted_log_prob(tokens: Tokens, *, cap: float) -> TokenLoss:
    """-w A log pi, with w = min(pi / behaviour, cap) held constant."""
    log_ratio = (tokens.logprobs - tokens.behaviour).detach()
    weight = _ratio(tokens.logprobs, tokens.behaviour, tokens.counts, cap=cap).detach()
    logprobs = torch.where(tokens.counts, tokens.logprobs, 0.0)
    cut = (log_ratio > math.log(cap)) & tokens.counts
    figures = {"clip_ratio/low_mean": torch.zeros_like(cut).sum(), "clip_ratio/high_mean": cut.sum()}
    return TokenLoss(loss=-weight * tokens.advantages * logprobs, figures=figures | _weight_figure(weight, tokens))


def _weight_figure(weight: torch.Tensor, tokens: Tokens) -> dict[str, torch.Tensor]:
    return {"sampling/importance_sampling_ratio/mean": (weight.detach() * tokens.mask).sum()}


def _proximal(tokens: Tokens) -> torch.Tensor:
    assert tokens.proximal is not None
    return tokens.proximal
