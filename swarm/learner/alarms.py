"""When a learner step is wrong, and what is done: skip it, lower the learning rate, or stop. Pure.

The alarms, in order of precedence:

    kind            when                                                         reaction
    not_finite      the gradient's norm is NaN or infinite                       skip that optimiser step
                    three learner steps in a row of nothing but such ones        stop
    mismatch_kl     most rollouts, and most samplers, claim log-probs further    skip all of the learner step
                    than MISMATCH_KL from the learner's own at equal weights
                    ten such learner steps in a row                              stop
    gradient_spike  the norm is above GRADIENT_SPIKE medians of the last 50      skip that optimiser step
                    and would have to be clipped
    entropy         it has fallen to ENTROPY_SHARE of what it was at             halve the learning rate, at most
                    first, and the reward has not risen for it                   every ten steps and to an eighth

A step that cannot be judged neither counts nor breaks a row: one with no group to learn from and, for mismatch_kl, one
with under half of its rollouts drawn by weights equal to the learner's, as most steps of an asynchronous run are. While
steps are skipped the weights stay, so older versions equal the newest (`unchanged_steps`), and a fault is seen until it
is gone.

Log-probs are claims of volunteers, and a hostile one might like to stop a run. So `typical_mismatch` takes medians over
rollouts and over samplers, and no minority of either can set off the alarm.

All that changes weights follows from the steps alone, so a replay decides the same, and so do ranks that are given the
same sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median, median_low

from msgspec import structs

from swarm.learner.claims import Claim
from swarm.learner.messages import Alarm, AlarmKind, AlarmState, Reaction

MISMATCH_KL = 0.5  # Nats a token
GRADIENT_SPIKE = 10.0  # Medians of the last norms
ENTROPY_SHARE = 0.1
GRADIENT_CLIP = 1.0  # Norm to which gradients are clipped; a shorter gradient is never a spike
NORMS_KEPT = 50  # Of 25 learner steps of two minibatches; spikes are among them, so a lasting change becomes normal
NORMS_BEFORE = 20  # Norms before any counts as a spike: the first ones of a run, under warm-up, are few and small
NOT_FINITE_STEPS = 3  # Learner steps in a row without one finite gradient: the fault is in the weights, not the batch
MISMATCH_STEPS = 10  # Learner steps in a row on which engine and learner disagree: a broken sampler may leave by then
ENTROPY_STEPS = 10  # Learner steps over which entropy and reward are averaged, since single steps are noisy
# A rise of the mean reward by this many spreads (of rewards within groups, at first) justifies less entropy. In
# seventeen runs of the demo that learned, the smallest rise was 7 spreads.
PAID_FOR = 0.5
LOWER_EVERY_STEPS = 10
MIN_SCALE = 1 / 8  # Three halvings; a collapse that goes on then is not the learning rate's fault

REASONS: dict[tuple[AlarmKind, Reaction], str] = {
    ("not_finite", "skip"): "the gradient is not finite: this optimiser step is left out",
    ("not_finite", "stop"): (
        f"no gradient of {NOT_FINITE_STEPS} learner steps was finite, so the weights or their arithmetic are broken: "
        "go on from an older checkpoint with a lower learning rate, or with precision float32"
    ),
    ("mismatch_kl", "skip"): "samplers and learner disagree about log-probs: this learner step is left out",
    ("mismatch_kl", "stop"): (
        f"samplers and learner have disagreed about log-probs {MISMATCH_STEPS} times in a row: compare their "
        "versions of transformers and vLLM, the samplers' dtype, and the chat template; look for one odd sampler in "
        "`echo-node status`"
    ),
    ("gradient_spike", "skip"): "the gradient is far larger than the last ones: this optimiser step is left out",
    ("entropy", "lower"): "the policy has lost its entropy and gained no reward for it: the learning rate is halved",
}


class Alarms:
    """`is_fit` judges every optimiser step before it is made, `stepped` every learner step after it. A checkpoint holds
    `state`."""

    def __init__(self, state: AlarmState | None = None) -> None:
        self.state = state or AlarmState()
        self._mismatch: float | None = None
        self._optimizer_steps = 0
        self._is_finite_seen = False
        self._broken: float | None = None
        self._spike: tuple[float, float] | None = None

    def is_fit(self, *, gradient_norm: float, mismatch_kl: float | None) -> bool:
        """Return whether the optimiser may step on a gradient that had this norm before clipping. `mismatch_kl` is the
        typical one of the step's first minibatch, in nats a token; None if there is none, and for the other
        minibatches."""
        if mismatch_kl is not None and not math.isnan(mismatch_kl):
            self._mismatch = mismatch_kl
        if not math.isfinite(gradient_norm):
            self._broken = gradient_norm
            return False
        self._is_finite_seen = True
        limit = max(GRADIENT_CLIP, GRADIENT_SPIKE * self._usual_norm())
        self.state = structs.replace(self.state, norms=(*self.state.norms, gradient_norm)[-NORMS_KEPT:])
        if self._is_mismatched:
            return False
        if gradient_norm > limit:
            if self._spike is None or gradient_norm > self._spike[0]:
                self._spike = (gradient_norm, limit)
            return False
        self._optimizer_steps += 1
        return True

    def stepped(self, figures: Mapping[str, float]) -> tuple[Alarm, ...]:
        """Return the alarms of the learner step, at most one of a kind. `figures` hold reward, reward_std and, if
        anything was trained on, entropy."""
        raised = [*self._not_finite(), *self._mismatched()]
        if self._spike is not None:
            raised.append(_alarm("gradient_spike", "skip", *self._spike))
        if self._optimizer_steps:
            self.state = structs.replace(self.state, unchanged_steps=0)
            raised += self._collapsed(figures)
        else:
            self.state = structs.replace(self.state, unchanged_steps=self.state.unchanged_steps + 1)
        self._mismatch = self._broken = self._spike = None
        self._optimizer_steps, self._is_finite_seen = 0, False
        return tuple(raised)

    # -- one kind each ---------------------------------------------------------------------------------------

    def _not_finite(self) -> list[Alarm]:
        if self._broken is None and not self._is_finite_seen:
            return []
        count = 0 if self._is_finite_seen else self.state.not_finite_steps + 1
        self.state = structs.replace(self.state, not_finite_steps=count)
        if self._broken is None:
            return []
        reaction: Reaction = "stop" if count >= NOT_FINITE_STEPS else "skip"
        return [_alarm("not_finite", reaction, self._broken, 0.0)]

    def _mismatched(self) -> list[Alarm]:
        if self._mismatch is None:
            return []
        count = self.state.mismatched_steps + 1 if self._is_mismatched else 0
        self.state = structs.replace(self.state, mismatched_steps=count)
        if not count:
            return []
        reaction: Reaction = "stop" if count >= MISMATCH_STEPS else "skip"
        return [_alarm("mismatch_kl", reaction, self._mismatch, MISMATCH_KL)]

    def _collapsed(self, figures: Mapping[str, float]) -> list[Alarm]:
        self.state = state = self._with_figures(figures)
        if len(state.recent) < ENTROPY_STEPS or len(state.first) < ENTROPY_STEPS:
            return []
        entropy, reward = _mean(state.recent, 0), _mean(state.recent, 1)
        limit = ENTROPY_SHARE * _mean(state.first, 0)
        paid_for = reward >= _mean(state.first, 1) + PAID_FOR * _mean(state.first, 2)
        may_lower = state.learning_rate_scale > MIN_SCALE and state.steps_since_lowered >= LOWER_EVERY_STEPS
        if entropy >= limit or paid_for or not may_lower:
            return []
        self.state = structs.replace(state, learning_rate_scale=state.learning_rate_scale / 2, steps_since_lowered=0)
        return [_alarm("entropy", "lower", entropy, limit)]

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def _is_mismatched(self) -> bool:
        return self._mismatch is not None and self._mismatch > MISMATCH_KL

    def _usual_norm(self) -> float:
        norms = self.state.norms
        return median(norms) if len(norms) >= NORMS_BEFORE and any(norms) else math.inf

    def _with_figures(self, figures: Mapping[str, float]) -> AlarmState:
        one = (figures["entropy"], figures["reward"], figures["reward_std"])
        state = structs.replace(self.state, steps_since_lowered=self.state.steps_since_lowered + 1)
        if len(state.first) < ENTROPY_STEPS:
            return structs.replace(state, first=(*state.first, one))
        return structs.replace(state, recent=(*state.recent, one)[-ENTROPY_STEPS:])


def typical_mismatch(compared: Sequence[Claim], *, rollouts: int) -> float | None:
    """Return the median over rollouts or the median over samplers of each sampler's median, whichever is less, in nats
    a token. None if fewer than half of `rollouts` could be compared: a sampler that claims the newest version while
    others lag would be judged alone."""
    if not compared or 2 * len(compared) < rollouts:
        return None
    by_sampler: defaultdict[str, list[float]] = defaultdict(list)
    for one in compared:
        by_sampler[one.sampler].append(one.nats / one.tokens)
    of_rollouts = median_low([value for own in by_sampler.values() for value in own])
    return min(of_rollouts, median_low([median_low(own) for own in by_sampler.values()]))


def mismatches_of(compared: Sequence[Claim]) -> dict[str, tuple[float, float]]:
    """Return the nats and the tokens of each sampler's rollouts together."""
    found: dict[str, tuple[float, float]] = {}
    for one in compared:
        nats, tokens = found.get(one.sampler, (0.0, 0.0))
        found[one.sampler] = nats + one.nats, tokens + one.tokens
    return found


def _alarm(kind: AlarmKind, reaction: Reaction, value: float, limit: float) -> Alarm:
    return Alarm(kind=kind, reaction=reaction, value=value, limit=limit, text=REASONS[kind, reaction])


def _mean(steps: tuple[tuple[float, float, float], ...], place: int) -> float:
    return fmean(step[place] for step in steps)
