"""How fast samplers must be, and how long the learner waits with a given set (derived in docs/capacity.md).

Symbols: R `rollouts_per_step`, T `train_step_s`, kappa `publish_every_steps`, S `max_staleness`, T_b `broadcast_s`
(from a publication until samplers have installed it), T_gen `generation_s` (of one rollout, in the mean), mu the summed
`rollouts_per_s`. Times are seconds, rates are rollouts per second. Arguments that make no sense raise a ValueError that
names them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.capacity.classes import thinned
from swarm.capacity.fleet import Demand, Worker
from swarm.capacity.recursion import Recursion, UnitClass

Binds = Literal["learner", "rate", "broadcast", "generation"]
"""What a step waits for (`binds`).

learner: its own training; the learner is idle for at most NEARLY_BUSY of the time. rate: the samplers' work; more
samplers would help. broadcast: versions in transit; a faster broadcast would help, or a larger max_staleness.
generation: the last answers of a batch; shorter or more even answers would help, or a larger max_staleness.
"""

NEARLY_BUSY = 0.02  # Idle share below which the learner counts as busy, and the default target
NEARLY_ALL_WORK = 0.05  # The learner waits for the samplers' rate if they are idle for at most this share of the time

ROLLOUTS = 10_000
"""Rollouts that a prediction follows, in about 40 ms. On 81 fleets the mean error was 0.46 points with 6,000, 0.34 with
8,000 and 0.31 with 12,000."""

MIN_STEPS = 12  # Fewest steps that a prediction follows, and leaves out before: fewer would show one step's luck
MAX_STEPS = 400  # Most steps that it follows: if a step is a few rollouts, more would add nothing
PLENTY = 32.0  # Times R / T: if this rate is not enough, no rate is
RATE_PRECISION = 0.005  # Relative precision of mu_min: rates are known far less precisely


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The long-run mean. Shares are of 1.

    `idle_share` is of the learner's time, `discarded_share` of all generated rollouts, `samplers_idle_share` of the
    places' time weighted by their rates. `mean_staleness` is in steps, over the trained rollouts. `step_s` is the time
    from batch to batch. `rollouts_per_s` counts trained rollouts.
    """

    idle_share: float
    discarded_share: float
    mean_staleness: float
    step_s: float
    rollouts_per_s: float
    samplers_idle_share: float
    binds: Binds


def slack_s(*, publish_every_steps: int, max_staleness: int, train_step_s: float, latency_s: float) -> float:
    """Return (S + 1 - kappa) T - latency: the time to make a batch of a version whose first rollouts came so late."""
    _check(publish_every_steps=publish_every_steps, train_step_s=train_step_s)
    _check_least_zero(max_staleness=max_staleness, latency_s=latency_s)
    return (max_staleness + 1 - publish_every_steps) * train_step_s - latency_s


def fresh_every_steps(*, publish_every_steps: int, max_staleness: int) -> int:
    """Return kappa ceil((S + 2 - kappa) / kappa): steps from one batch that needs a new version to the next one."""
    return math.ceil((max_staleness + 2 - publish_every_steps) / publish_every_steps) * publish_every_steps


def shortfall(demand: Demand, *, broadcast_s: float, generation_s: float) -> str | None:
    """Return None if at some rate the learner never waits, else the inequality that fails and by how much."""
    check_demand(demand)
    left_s = slack_s(
        publish_every_steps=demand.publish_every_steps,
        max_staleness=demand.max_staleness,
        train_step_s=demand.train_step_s,
        latency_s=_check_least_zero(broadcast_s=broadcast_s) + _check_least_zero(generation_s=generation_s),
    )
    if left_s > 0:
        return None
    within_s = left_s + broadcast_s + generation_s
    return (
        f"broadcast_s + generation_s < (max_staleness + 1 - publish_every_steps) * train_step_s fails: "
        f"{broadcast_s:g} + {generation_s:g} is not below {within_s:g}, by {-left_s:g} s"
    )


def predict(demand: Demand, workers: Sequence[Worker], install_s: Sequence[float]) -> Prediction:
    """Return what the learner and these workers do in the long run. `install_s[i]` is the time from a version's
    publication to its install by worker i. Without workers the learner is idle for ever."""
    check_fleet(demand, workers, install_s)
    if not workers:
        return Prediction(
            idle_share=1.0,
            discarded_share=0.0,
            mean_staleness=0.0,
            step_s=math.inf,
            rollouts_per_s=0.0,
            samplers_idle_share=0.0,
            binds="rate",
        )
    return _follow(demand, *thinned(demand, workers, install_s))


def mu_min(
    demand: Demand,
    workers: Sequence[Worker],
    install_s: Sequence[float],
    *,
    idle_target: float = NEARLY_BUSY,
) -> float:
    """Return the least summed rate at which workers like these leave the learner idle for at most `idle_target`, or inf
    if no number of them does."""
    check_fleet(demand, workers, install_s)
    if not 0 < idle_target < 1:
        raise ValueError(f"idle_target is {idle_target:g}, it must be between 0 and 1")
    if not workers:
        return math.inf
    whole = sum(worker.rollouts_per_s for worker in workers)

    def suffices(rate: float) -> bool:
        found = _follow(demand, *thinned(demand, workers, install_s, scale=rate / whole))
        return found.idle_share <= idle_target

    needed = demand.rollouts_per_step / demand.train_step_s
    low, high = needed * (1 - idle_target), needed
    while not suffices(high):
        low, high = high, 2 * high
        if high > PLENTY * needed:
            return math.inf
    while high > low * (1 + RATE_PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def check_demand(demand: Demand) -> None:
    """Raise a one-line ValueError if the demand makes no sense."""
    _check(
        train_step_s=demand.train_step_s,
        groups_per_step=demand.groups_per_step,
        group_size=demand.group_size,
        publish_every_steps=demand.publish_every_steps,
    )
    _check_least_zero(max_staleness=demand.max_staleness)
    if demand.publish_every_steps > demand.max_staleness + 1:
        raise ValueError(
            f"publish_every_steps is {demand.publish_every_steps}, it must be at most max_staleness + 1 = "
            f"{demand.max_staleness + 1}, or all would wait for ever"
        )


def check_fleet(demand: Demand, workers: Sequence[Worker], install_s: Sequence[float]) -> None:
    """Raise a one-line ValueError if any figure makes no sense, or if there is not one install for each worker."""
    check_demand(demand)
    if len(workers) != len(install_s):
        raise ValueError(f"install_s has {len(install_s)} entries for {len(workers)} workers")
    for worker, delay_s in zip(workers, install_s, strict=True):
        try:
            _check(rollouts_per_s=worker.rollouts_per_s, samples_at_once=worker.samples_at_once)
            _check_least_zero(install_s=delay_s)
        except ValueError as fault:
            raise ValueError(f"worker {worker.name}: {fault}") from None


def binds(
    demand: Demand,
    *,
    step_s: float,
    samplers_idle_share: float,
    broadcast_s: float,
    rollouts_per_s: float,
) -> Binds:
    """Return the largest part of a step that is longer than training.

    If samplers always work, it is their work. Otherwise the bound holds the learner up. The closed form of a step
    (docs/capacity.md), solved for batch_s, gives the time from a version's arrival to its full batch: R / mu of it is
    work, the rest is waiting for the last answers.
    """
    if 1 - demand.train_step_s / step_s <= NEARLY_BUSY:
        return "learner"
    work_s = demand.rollouts_per_step / rollouts_per_s
    if samplers_idle_share <= NEARLY_ALL_WORK:
        return "rate"
    bound_steps = demand.max_staleness + 2 - demand.publish_every_steps
    steps = fresh_every_steps(publish_every_steps=demand.publish_every_steps, max_staleness=demand.max_staleness)
    fresh_s = steps * step_s - (steps - bound_steps) * demand.train_step_s
    batch_s = fresh_s - demand.train_step_s - broadcast_s
    parts: dict[Binds, float] = {"rate": work_s, "broadcast": broadcast_s, "generation": batch_s - work_s}
    return max(parts, key=lambda part: parts[part])


def _follow(demand: Demand, small: Demand, classes: Sequence[UnitClass]) -> Prediction:
    recursion = Recursion(small, classes)
    every = fresh_every_steps(publish_every_steps=demand.publish_every_steps, max_staleness=demand.max_staleness)
    first = max(MIN_STEPS, 2 * (demand.max_staleness + 1 + demand.publish_every_steps))
    recursion.steps(first)
    count = min(MAX_STEPS, max(MIN_STEPS, ROLLOUTS // small.rollouts_per_step - first))
    count += -count % every
    elapsed_s = recursion.steps(count)
    tally = recursion.tally
    rates = [one.units * one.samples / one.unit_s for one in classes]
    installs = sum(rate * one.install_s for rate, one in zip(rates, classes, strict=True))
    samplers_idle_share = min(1.0, max(0.0, 1 - tally.busy / (sum(rates) * elapsed_s)))
    return Prediction(
        idle_share=max(0.0, 1 - count * demand.train_step_s / elapsed_s),
        discarded_share=tally.discarded / max(1, tally.finished),
        mean_staleness=tally.staleness / tally.trained,
        step_s=elapsed_s / count,
        rollouts_per_s=demand.rollouts_per_step * count / elapsed_s,
        samplers_idle_share=samplers_idle_share,
        binds=binds(
            demand,
            step_s=elapsed_s / count,
            samplers_idle_share=samplers_idle_share,
            broadcast_s=installs / sum(rates),
            rollouts_per_s=sum(rates) * demand.rollouts_per_step / small.rollouts_per_step,
        ),
    )


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value:g}, it must be positive and finite")


def _check_least_zero(**values: float) -> float:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value:g}, it must be finite and not negative")
    return value
