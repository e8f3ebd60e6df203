"""How long a step takes with a given set of samplers, in closed form (derived in docs/capacity.md).

Symbols: R `rollouts_per_step`, T `train_step_s`, kappa `publish_every_steps`, S `max_staleness`, T_b `broadcast_s`
(from a publication until samplers have installed it), T_gen `generation_s` (of one rollout, in the mean), mu the summed
`rollouts_per_s`. Times are seconds, rates are rollouts per second. Arguments that make no sense raise a ValueError that
names them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from swarm.pay.fleet import Demand, Worker, mean_longest

Binds = Literal["learner", "rate", "broadcast", "generation"]
"""What a step waits for (`binds`).

learner: its own training; the learner is idle for at most NEARLY_BUSY of the time. rate: the samplers' work; more
samplers would help. broadcast: versions in transit; a faster broadcast would help, or a larger max_staleness.
generation: the last answers of a batch; shorter or more even answers would help, or a larger max_staleness.
"""

NEARLY_BUSY = 0.02  # Idle share below which the learner counts as busy, and the default target
NEARLY_ALL_WORK = 0.05  # The learner waits for the samplers' rate if they are idle for at most this share of the time

SPARE_SHARE = 1 / 16  # Spare groups of a batch: half of the most that pacing opens (rollout/plane/rules.py)
DEALS = 4  # Orders of the lengths over which the time to fill a batch is averaged: its last answer is a matter of luck


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The long-run mean. `idle_share` is of the learner's time, `step_s` the time from batch to batch."""

    idle_share: float
    step_s: float
    binds: Binds


def shortfall(demand: Demand, *, broadcast_s: float, generation_s: float) -> str | None:
    """Return None if at some rate the learner never waits, else the inequality that fails and by how much."""
    check_demand(demand)
    _check_least_zero(broadcast_s=broadcast_s, generation_s=generation_s)
    left_s = demand.max_latency_s - (broadcast_s + generation_s)
    if left_s > 0:
        return None
    return (
        f"broadcast_s + generation_s < (max_staleness + 1 - publish_every_steps) * train_step_s fails: "
        f"{broadcast_s:g} + {generation_s:g} is not below {demand.max_latency_s:g}, by {-left_s:g} s"
    )


def predict(demand: Demand, workers: Sequence[Worker], install_s: Sequence[float]) -> Prediction:
    """Return how long a step of these workers takes in the long run: max(T, R / mu, (T + F + (c kappa - m) T) /
    (c kappa)) with F = `fill_s`, m = S + 2 - kappa and c = ceil(m / kappa). `install_s[i]` is the time from a version's
    publication to its install by worker i. Without workers the learner is idle for ever."""
    check_fleet(demand, workers, install_s)
    if not workers:
        return Prediction(idle_share=1.0, step_s=math.inf, binds="rate")
    rate = math.fsum(worker.rollouts_per_s for worker in workers)
    period, fresh_steps = demand.publish_every_steps, demand.max_staleness + 2 - demand.publish_every_steps
    steps = math.ceil(fresh_steps / period) * period  # From one batch that needs a new version to the next one
    others = steps - fresh_steps
    work_s, filled_s = demand.rollouts_per_step / rate, fill_s(demand, workers, install_s)
    fresh_s = (demand.train_step_s * (1 + others) + filled_s) / steps
    step_s = max(demand.train_step_s, work_s, fresh_s)
    mean_install_s = math.fsum(w.rollouts_per_s * own_s for w, own_s in zip(workers, install_s, strict=True)) / rate
    return Prediction(
        idle_share=1 - demand.train_step_s / step_s,
        step_s=step_s,
        binds=_binds(demand, step_s, filled_s, broadcast_s=mean_install_s, work_s=work_s),
    )


def fill_s(demand: Demand, workers: Sequence[Worker], install_s: Sequence[float]) -> float:
    """Return the mean seconds from a publication until these workers have made a batch of that version. Each sample
    goes to the place that is expected to finish it first; a place begins when it has the version. Some spare groups are
    begun, and the batch is full when the first B groups are done. The mean is over DEALS orders of the lengths."""
    groups = demand.groups_per_step + int(SPARE_SHARE * demand.groups_per_step)
    sizes = [worker.samples_at_once if worker.lockstep else 1 for worker in workers]
    longest = {size: mean_longest(demand.lengths.tokens, size) for size in set(sizes)}
    places = [
        _FreePlace(own_s + worker.place_s, own_s, worker.place_s, size, worker.place_s / longest[size])
        for worker, own_s, size in zip(workers, install_s, sizes, strict=True)
        for _ in range(min(worker.samples_at_once // size, groups * demand.group_size))
    ]
    pack = [*demand.lengths.tokens] * -(-groups * demand.group_size // len(demand.lengths.tokens))
    filled_s = 0.0
    for deal in range(DEALS):
        ends_s = _ends_s(places, Random(deal).sample(pack, groups * demand.group_size))
        done_s = sorted(max(ends_s[i : i + demand.group_size]) for i in range(0, len(ends_s), demand.group_size))
        filled_s += done_s[demand.groups_per_step - 1] / DEALS
    return filled_s


class _FreePlace(NamedTuple):
    """A place, or a whole engine in lockstep, that is free from `begin_s` on."""

    expected_end_s: float
    begin_s: float
    mean_s: float
    samples: int
    token_s: float


def _ends_s(places: Sequence[_FreePlace], lengths: Sequence[float]) -> list[float]:
    """Return when each sample is done, in order."""
    free = [*places]
    heapq.heapify(free)
    ends_s: list[float] = []
    while len(ends_s) < len(lengths):
        place = free[0]
        taken = lengths[len(ends_s) : len(ends_s) + place.samples]
        end_s = place.begin_s + max(taken) * place.token_s
        ends_s += [end_s] * len(taken)
        heapq.heapreplace(free, place._replace(expected_end_s=end_s + place.mean_s, begin_s=end_s))
    return ends_s


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


def _binds(demand: Demand, step_s: float, filled_s: float, *, broadcast_s: float, work_s: float) -> Binds:
    """Return the largest part of a step that is longer than training. It is the samplers' work if they hardly ever
    wait. Otherwise the bound holds the learner up: of the time until a batch of a version is full, R / mu is work, a
    part is the way of the version, and the rest is the wait for the last answers."""
    if 1 - demand.train_step_s / step_s <= NEARLY_BUSY:
        return "learner"
    if work_s >= (1 - NEARLY_ALL_WORK) * step_s:
        return "rate"
    parts: dict[Binds, float] = {
        "rate": work_s,
        "broadcast": broadcast_s,
        "generation": filled_s - broadcast_s - work_s,
    }
    return max(parts, key=lambda part: parts[part])


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value:g}, it must be positive and finite")


def _check_least_zero(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value:g}, it must be finite and not negative")
