"""The losses that a learner step minimises. A new objective is one function here, under @objective, and its name in
types.ObjectiveName.

docs/learner.md has every formula as it is coded, with its source. Behaviour log-probs are claims of untrusted samplers,
so no finite claim may make anything infinite or NaN: tokens that do not count are masked and every ratio is capped
before exp, since infinity times a mask of zero would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm.learner.messages import TrainerConfig

REFERENCE_CAP = 10.0  # Of reference / pi, far outside any clip in use: it binds only where a gradient would explode
# For truncated importance sampling: at the low end of common values, since the weights come from claims. A lower cap
# biases more tokens, a higher one adds variance.
WEIGHT_CAP = 2.0

RATIO_CAP = 10.0  # Of a token's ratio, for both signs of its advantage: bounds the effect of one bad token

ICEPOP_LOW, ICEPOP_HIGH = 0.5, 5.0  # icepop drops tokens with proximal / behaviour outside of this, as in its paper


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Completion tokens of a micro-batch: [tokens] each. `proximal` is set for objectives that want it. `counts_of` is
    the number of tokens of each rollout."""

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    proximal: torch.Tensor | None = None
    counts_of: tuple[int, ...] = ()

    @property
    def counts(self) -> torch.Tensor:
        return self.mask.bool()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of every token, [tokens], before masking; `figures` are sums over the tokens that count."""

    loss: torch.Tensor
    figures: dict[str, torch.Tensor]


Formula = Callable[[Tokens, TrainerConfig], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A formula, and whether it needs the log-probs of the policy at the start of the learner step, which take one more
    forward pass over the batch."""

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
def grpo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """-min(r A, clip(r) A), with r = min(pi / behaviour, RATIO_CAP).

    GRPO (arXiv 2402.03300, equation 3) with DAPO's asymmetric clip (arXiv 2503.14476, equation 8).
    """
    ratio = _ratio(tokens.logprobs, tokens.behaviour, tokens.counts, cap=RATIO_CAP)
    gain, figures = _clipped(ratio, tokens, config)
    return TokenLoss(loss=-gain, figures=figures | _weight_figure(ratio, tokens))


@objective()
def gspo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """-min(s A, clip(s) A), with s = min(exp(mean over the rollout's tokens of log(pi / behaviour)), RATIO_CAP).

    GSPO (arXiv 2507.18071, equations 5 and 7): all tokens of a rollout have the same ratio.
    """
    mean = _mean_of_rollout(tokens.logprobs - tokens.behaviour, tokens)
    ratio = mean.clamp(max=math.log(RATIO_CAP)).exp()
    gain, figures = _clipped(ratio, tokens, config)
    return TokenLoss(loss=-gain, figures=figures | _weight_figure(ratio, tokens))


@objective(wants_proximal=True)
def decoupled_ppo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """-w min(r A, clip(r) A), with r = min(pi / proximal, RATIO_CAP) and w = min(proximal / behaviour, WEIGHT_CAP).

    Hilton et al. (arXiv 2110.00641), AReaL (arXiv 2505.24298); truncated here.
    """
    weight = _ratio(_proximal(tokens), tokens.behaviour, tokens.counts, cap=WEIGHT_CAP)
    ratio = _ratio(tokens.logprobs, _proximal(tokens), tokens.counts, cap=RATIO_CAP)
    gain, figures = _clipped(ratio, tokens, config)
    return TokenLoss(loss=-weight * gain, figures=figures | _weight_figure(weight, tokens))


@objective(wants_proximal=True)
def icepop(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """decoupled_ppo with w = proximal / behaviour where that is in [ICEPOP_LOW, ICEPOP_HIGH], and 0 elsewhere.

    Ring-1T (arXiv 2510.18855).
    """
    # A cap outside of the band, so that a capped ratio is outside too.
    found = _ratio(_proximal(tokens), tokens.behaviour, tokens.counts, cap=2 * ICEPOP_HIGH)
    inside = (found >= ICEPOP_LOW) & (found <= ICEPOP_HIGH)
    weight = torch.where(inside, found, 0.0)
    ratio = _ratio(tokens.logprobs, _proximal(tokens), tokens.counts, cap=RATIO_CAP)
    gain, figures = _clipped(ratio, tokens, config)
    figures["sampling/masked_ratio"] = (~inside & tokens.counts).sum()
    return TokenLoss(loss=-weight * gain, figures=figures | _weight_figure(weight, tokens))


@objective()
def cispo(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """-w A log pi, with w = min(pi / behaviour, 1 + high) held constant.

    MiniMax-M1 (arXiv 2506.13585, section 3.1), whose lower clip never binds.
    """
    return _weighted_log_prob(tokens, cap=1 + config.resolved_clip[1])


@objective()
def tis(tokens: Tokens, config: TrainerConfig) -> TokenLoss:
    """-w A log pi, with w = min(pi / behaviour, WEIGHT_CAP) held constant: truncated importance sampling without a
    clip.

    As AIPO in LlamaRL (arXiv 2505.24034).
    """
    return _weighted_log_prob(tokens, cap=WEIGHT_CAP)


def kl_to_reference(logprobs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = min(log(reference / pi), log REFERENCE_CAP): [tokens]; 0 where a token does not count.

    Schulman's estimator k3 of KL(pi, reference), equation 4 of GRPO (arXiv 2402.03300).
    """
    log_ratio = torch.where(mask.bool(), reference - logprobs, 0.0).clamp(max=math.log(REFERENCE_CAP))
    return torch.expm1(log_ratio) - log_ratio


# -- parts -------------------------------------------------------------------------------------------------------


def token_weights(counts: Sequence[int], config: TrainerConfig, *, tokens: float, rollouts: float) -> list[float]:
    """Return the weight of a token of each rollout in the loss of a minibatch with this number of `tokens` and
    `rollouts`. `counts` are the tokens of the rollouts for which weights are returned.

    DAPO's mean over tokens (arXiv 2503.14476, section 3.3); the mean over rollouts of their own means, as GRPO has it
    (arXiv 2402.03300, equation 3) and GSPO; or division by the longest completion (Dr. GRPO, arXiv 2503.20783, 3.2).
    """
    match config.resolved_normalisation:
        case "tokens":
            return [1 / tokens] * len(counts)
        case "rollouts":
            return [1 / (rollouts * max(1, count)) for count in counts]
        case "constant":
            return [1 / (rollouts * config.longest_completion)] * len(counts)


def _mean_of_rollout(values: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """For each token, the mean over the tokens of its rollout that count; 0 if none counts."""
    rows = torch.arange(len(tokens.counts_of), device=values.device).repeat_interleave(
        torch.tensor(tokens.counts_of, device=values.device)
    )
    sums = values.new_zeros(len(tokens.counts_of)).index_add(0, rows, torch.where(tokens.counts, values, 0.0))
    counted = values.new_zeros(len(tokens.counts_of)).index_add(0, rows, tokens.counts.to(values.dtype))
    return (sums / counted.clamp(min=1.0))[rows]


def _ratio(of: torch.Tensor, to: torch.Tensor, counts: torch.Tensor, *, cap: float) -> torch.Tensor:
    """min(exp(of - to), cap), without a gradient above the cap; 1 for tokens that do not count."""
    return torch.where(counts, of - to, 0.0).clamp(max=math.log(cap)).exp()


def _clipped(
    ratio: torch.Tensor, tokens: Tokens, config: TrainerConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """min(r A, clip(r) A), and the number of tokens on which each clip binds."""
    below, above = config.resolved_clip
    bounded = ratio.clamp(1 - below, 1 + above)
    low = (ratio < 1 - below) & (tokens.advantages < 0) & tokens.counts
    high = (ratio > 1 + above) & (tokens.advantages > 0) & tokens.counts
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
