"""What a learner step makes smaller. A new objective is one function here, under @objective, and its name in
types.ObjectiveName.

Every formula is in docs/learner.md as it is coded, with its source. Behaviour log-probs are claims of untrusted
samplers, so no finite claim may make anything infinite or NaN: tokens that do not count are masked and every ratio is
capped before exp, since an infinity times a mask of zero would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm.learner.messages import TrainerConfig

REFERENCE_CAP = 10.0  # Of reference / pi, far outside any clip in use: it binds only where a gradient would run away
# Of truncated importance sampling: the low end of what is in use, since the weights come from claims. It biases each
# token beyond it, and each weight above it would add variance.
WEIGHT_CAP = 2.0

RATIO_CAP = 10.0  # Of a token's ratio, for both signs of its advantage: what one bad token may cost

ICEPOP_LOW, ICEPOP_HIGH = 0.5, 5.0  # Outside this band of proximal / behaviour icepop drops a token, as in its paper


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Completion tokens of a micro-batch: [tokens] each. `proximal` is there for objectives that ask for it.
    `counts_of` says how many tokens each rollout has."""

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

    GSPO (arXiv 2507.18071, equations 5 and 7): one ratio for a rollout, which each of its tokens has.
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
    # Just beyond the band: a larger one is outside too.
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
    """-w A log pi, with w = min(pi / behaviour, WEIGHT_CAP) held constant: importance sampling, truncated, no clip.

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
    """Return what a token of each rollout counts for in the loss of a minibatch of so many `tokens` and `rollouts`;
    `counts` are the tokens of some of its rollouts.

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
    """The mean over the tokens of a rollout that count, at each of its tokens; 0 where none counts."""
    rows = torch.arange(len(tokens.counts_of), device=values.device).repeat_interleave(
        torch.tensor(tokens.counts_of, device=values.device)
    )
    sums = values.new_zeros(len(tokens.counts_of)).index_add(0, rows, torch.where(tokens.counts, values, 0.0))
    counted = values.new_zeros(len(tokens.counts_of)).index_add(0, rows, tokens.counts.to(values.dtype))
    return (sums / counted.clamp(min=1.0))[rows]


def _ratio(of: torch.Tensor, to: torch.Tensor, counts: torch.Tensor, *, cap: float) -> torch.Tensor:
    """min(exp(of - to), cap), without a gradient beyond it; 1 where a token does not count."""
    return torch.where(counts, of - to, 0.0).clamp(max=math.log(cap)).exp()


def _clipped(
    ratio: torch.Tensor, tokens: Tokens, config: TrainerConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """min(r A, clip(r) A), and on how many tokens either clip binds."""
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
