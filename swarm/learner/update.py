"""One learner step: a few optimiser steps over the rows of a batch. Read it from top to bottom."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from swarm.learner.adapter import WithoutAdapter
from swarm.learner.advantages import reward_figures, rows_of
from swarm.learner.alarms import GRADIENT_CLIP, Alarms, typical_mismatch
from swarm.learner.batch import MicroBatch, Row, by_prompt
from swarm.learner.checkpoint.saving import Parts
from swarm.learner.claims import MIN_TOKENS, TOKEN_DISTANCE, Claim, Claims
from swarm.learner.messages import Alarm, TrainerConfig, TrainGroup
from swarm.learner.objective import OBJECTIVES, Tokens, kl_to_reference, token_weights
from swarm.learner.policy import Policy, TokenFigures
from swarm.types import Schedule

MAX_TOKEN_KL = 5.0  # Nats, for one token in mismatch_kl. From here on the two distributions have nothing in common.

FLOOR = 0.1  # Share of its peak to which the learning rate falls
WSD_DECAY = 0.2
"""Share of the steps after the warm-up, at the end, in which `wsd` decays; its authors use a tenth to a fifth (MiniCPM,
arXiv 2404.06395)."""

Sums = defaultdict[str, float]

PER_TOKEN = ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "sampling/importance_sampling_ratio/mean")
"""Figures that every step has; 0 if nothing was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning(Parts):
    policy: Policy
    reference: Policy | WithoutAdapter | None
    rounded: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which passes use the same weights that samplers get."""


class Update:
    """Takes learner steps."""

    def __init__(self, config: TrainerConfig, learning: Learning) -> None:
        self._config = config
        self._at = learning
        self.learning_rate = config.resolved_learning_rate  # The peak; the owner may change it during the run
        self.objective = OBJECTIVES[config.objective]
        learning.policy.module.entropy_pulls = config.entropy_weight > 0
        self.alarms = Alarms()
        self.claims = Claims() if config.audit_share else Claims(math.inf)
        self.withheld = Counter[str]()
        """For each sampler, how many rollouts the last step left out because of their claims."""
        self.compared: list[Claim] = []
        """The claims of the last step that could be compared at equal weights."""

    def step(self, groups: Sequence[TrainGroup], step: int) -> tuple[dict[str, float], tuple[Alarm, ...]]:
        """Train on the groups that have any variance. Return the figures, by TRL's names, and the alarms."""
        figures = reward_figures(groups, self._config)
        self.compared = []
        self.set_learning_rate(step)
        sums: Sums = defaultdict(float)
        rows = rows_of(groups, self._config)
        minibatches: tuple[torch.Tensor, ...] = ()
        if rows:
            rows = self._with_former_logprobs(rows)
            minibatches = self._minibatches(rows)
        claims: list[Claim] = []
        teaching = 1 - figures["frac_reward_zero_std"]
        for number, places in enumerate(minibatches):
            of_it = [rows[place] for place in places]
            claims += self.optimizer_step(of_it, sums, teaching=teaching, is_first=number == 0)
        self.withheld = self.claims.stepped(claims)
        figures |= self._figures(sums, len(minibatches)) | {"rollouts_withheld": float(self.withheld.total())}
        return figures, self.alarms.stepped(figures)

    # -- parts -----------------------------------------------------------------------------------------------

    def _minibatches(self, rows: Sequence[Row]) -> tuple[torch.Tensor, ...]:
        """The indices of the rows of each minibatch. Prompts are shuffled; rows of one prompt stay together, so that
        they can share it."""
        prompts = by_prompt(rows)
        order = torch.randperm(len(prompts), generator=self._at.shuffle).tolist()
        return torch.tensor([place for prompt in order for place in prompts[prompt]]).chunk(self._config.minibatches)

    def _with_former_logprobs(self, rows: list[Row]) -> list[Row]:
        if self.objective.wants_proximal:
            found = self.read_all(rows, self._at.policy)
            rows = [replace(row, proximal=logprobs) for row, logprobs in zip(rows, found, strict=True)]
        if self._at.reference is not None:
            found = self.read_all(rows, self._at.reference)
            rows = [replace(row, reference=logprobs) for row, logprobs in zip(rows, found, strict=True)]
        return rows

    @torch.no_grad()
    def read_all(self, rows: Sequence[Row], policy: Policy | WithoutAdapter) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        places, parts, idle = self._at.ranks.divide(rows, self._config, self._at.device)
        with self._at.rounded():
            for part in parts:
                logprobs = policy.read(part).logprobs.cpu()
                found |= {places[number]: values for number, values in part.by_row(logprobs).items()}
                self._at.progress()
            for part in idle:
                policy.read(part)
        found = self._at.ranks.merge(found)
        return [found[place] for place in range(len(rows))]

    def optimizer_step(self, rows: Sequence[Row], sums: Sums, *, is_first: bool, teaching: float = 1.0) -> list[Claim]:
        """Accumulate the gradient over micro-batches and step. The weight of a token depends on the whole minibatch,
        not on how it is divided, and on `teaching`, the share of groups with any variance: the others were left out,
        but count in the mean. Return the claims of all rows."""
        config, rollouts = self._config, len(rows) / teaching
        tokens = max(1, sum(len(row.behaviour) for row in rows)) / teaching
        own: Sums = defaultdict(float)
        claimed: dict[int, torch.Tensor] = {}
        places, parts, idle = self._at.ranks.divide(rows, self._config, self._at.device)
        passes = [*parts, *idle]
        with self._at.rounded():
            for number, part in enumerate(passes, start=1):
                shares = token_weights(part.counts, config, tokens=tokens, rollouts=rollouts)
                figures = self._accumulate(part, shares, own, is_last=number == len(passes))
                if number <= len(parts):
                    of_rows = zip(part.numbers, figures.split(part.voices_of), strict=True)
                    claimed |= {places[row]: of_row for row, of_row in of_rows}
                self._at.progress()
        found = self._at.ranks.add_up(dict(own))
        claims = self._claims(rows, claimed)
        mismatch = None
        if is_first:
            self.compared = [one for one in claims if one.tokens]
            found |= _mismatch_figure(self.compared)
            mismatch = typical_mismatch(self.compared, rollouts=len(claims))
        norm = self._at.ranks.clip_gradient(self._at.model, GRADIENT_CLIP)
        if self.alarms.is_fit(gradient_norm=norm, mismatch_kl=mismatch):
            self._at.optimizer.step()
            found |= {"grad_norm": norm, "stepped": 1.0}
        self._at.optimizer.zero_grad(set_to_none=True)
        # If the gradient is not finite, nor are these sums, and they would spoil the figures of the whole step.
        if math.isfinite(norm):
            sums["finite"] += 1
            for name, value in found.items():
                sums[name] += value
        return claims

    def _claims(self, rows: Sequence[Row], own: dict[int, torch.Tensor]) -> list[Claim]:
        """The claims of the rows of all ranks, in the same order on every rank."""
        found = self._at.ranks.merge(own)
        return [
            Claim(sampler, rows[place].staleness, *figures)
            for place in sorted(found)
            for sampler, figures in zip(rows[place].samplers, found[place].tolist(), strict=True)
        ]

    def _accumulate(self, part: MicroBatch, shares: Sequence[float], sums: Sums, *, is_last: bool) -> torch.Tensor:
        """Forward and backward pass of one micro-batch, in which claims that are too far off do not count. Return
        distance, nats and tokens of each voice's claims, [voices, 3]. `shares` is the weight of a token of each row."""
        config = self._config
        read = self._at.policy.read(part)
        distances, believed = _believed(read, part, self.claims)
        mask = part.mask * believed
        found = self.objective.formula(
            Tokens(
                logprobs=read.logprobs,
                behaviour=part.behaviour,
                advantages=part.advantages,
                mask=mask,
                proximal=part.proximal,
                counts_of=part.counts,
            ),
            config,
        )
        losses, figures = found.loss * mask, found.figures
        if part.reference is not None:
            kl = kl_to_reference(read.logprobs, part.reference, mask)
            losses = losses + config.kl_weight * kl
            figures |= {"kl": kl.sum()}
        if config.entropy_weight:
            losses = losses - config.entropy_weight * read.entropy * mask
        counts = torch.tensor(part.counts)
        loss = (losses * torch.tensor(shares).repeat_interleave(counts).to(losses.device)).sum()
        self._at.ranks.backward(loss, self._at.policy.module, is_last=is_last)
        figures |= {"loss": loss, "tokens": mask.sum(), "entropy": (read.entropy * mask).sum()}
        for name, value in figures.items():
            sums[name] += float(value.detach())
        compared = _compared(read, part, self.alarms.state.unchanged_steps)
        return torch.cat([distances[:, None].cpu(), compared], dim=1)

    def _figures(self, sums: Sums, minibatches: int) -> dict[str, float]:
        steps = sums.pop("stepped", 0.0)
        tokens = max(1.0, sums.pop("tokens", 0.0))
        # Missing if no token was drawn by the learner's current version.
        mismatch = {"mismatch_kl": sums.pop("mismatch_kl")} if "mismatch_kl" in sums else {}
        return {
            "loss": sums.pop("loss", 0.0) / max(1.0, sums.pop("finite", 0.0)),
            "grad_norm": sums.pop("grad_norm", 0.0) / max(1.0, steps),
            "learning_rate": self._at.optimizer.param_groups[0]["lr"],
            "optimizer_steps": steps,
            "optimizer_steps_skipped": minibatches - steps,
            **dict.fromkeys(PER_TOKEN, 0.0),
            **{name: value / tokens for name, value in sums.items()},
            **mismatch,
        }

    def set_learning_rate(self, step: int) -> None:
        config = self._config
        share = scheduled_share(config.schedule, step, steps=config.steps, warmup_steps=config.warmup_steps)
        for group in self._at.optimizer.param_groups:
            group["lr"] = self.learning_rate * share * self.alarms.state.learning_rate_scale


def scheduled_share(schedule: Schedule, step: int, *, steps: int, warmup_steps: int) -> float:
    """The learning rate of step 0, 1, ... as a share of its peak.

    It rises linearly over the first `warmup_steps`. Then, with x from 0 to 1 at `steps`, it is 1 (constant),
    1 - (1 - FLOOR)·x (linear), FLOOR + (1 - FLOOR)·(1 + cos πx)/2 (cosine), or 1 until the last WSD_DECAY of x, over
    which it falls linearly to the floor (wsd: warm up, stay, decay). After `steps` it stays at the floor.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    x = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            left = 1 - x
        case "cosine":
            left = (1 + math.cos(math.pi * x)) / 2
        case "wsd":
            left = min(1.0, (1 - x) / WSD_DECAY)
    return FLOOR + (1 - FLOOR) * left


def _mismatch_figure(compared: Sequence[Claim]) -> dict[str, float]:
    """The mean over all compared tokens, if there are any."""
    tokens = sum(one.tokens for one in compared)
    return {"mismatch_kl": sum(one.nats for one in compared) / tokens} if tokens else {}


@torch.no_grad()
def _believed(read: TokenFigures, part: MicroBatch, claims: Claims) -> tuple[torch.Tensor, torch.Tensor]:
    """The distance of each voice's claims, and for each token 0 if that distance is over the limit, else 1."""
    off = (read.logprobs - part.behaviour).abs().clamp(max=TOKEN_DISTANCE)
    counts = part.voices.bincount(minlength=sum(part.voices_of))
    sums = torch.zeros(len(counts), device=off.device).index_add_(0, part.voices, off)
    distances = sums / counts.clamp(min=MIN_TOKENS)
    ages, of_tokens = part.staleness.unique(return_inverse=True)
    limits = torch.tensor([claims.limit(int(age)) for age in ages.tolist()], device=off.device)
    # A distance of NaN passes: the weights are broken, which is for the alarms.
    return distances, (~(distances[part.voices] > limits[of_tokens])).to(part.mask.dtype)


@torch.no_grad()
def _compared(read: TokenFigures, part: MicroBatch, unchanged_steps: int) -> torch.Tensor:
    """Divergence of the engine's log-probs from the learner's, for each voice: its sum and the number of tokens,
    [voices, 2]. Only tokens drawn with the learner's present weights count: their version is at most `unchanged_steps`
    old.

    The estimator r - 1 - log r of KL(behaviour, learner) is never negative (Schulman's k3). It is capped, so that no
    single claim dominates the sum.
    """
    same = part.mask * (part.staleness <= unchanged_steps)
    log_ratio = read.logprobs - part.behaviour
    kl = (log_ratio.exp() - 1 - log_ratio).clamp(max=MAX_TOKEN_KL)
    # On the CPU, where a replay adds up in the same order.
    both = torch.stack([kl * same, same], dim=1).cpu()
    return torch.zeros(sum(part.voices_of), 2).index_add_(0, part.voices.cpu(), both)
