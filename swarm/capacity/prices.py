"""What a sampler costs and what it is good for, as pure functions: the figures by which samplers are ranked.

Prices are per hour in the currency of the fleet, traffic prices per GB, rates in rollouts per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.capacity.fleet import GB, Demand, Worker

HOUR_S = 3600.0

GENERATION_PART = 0.3
"""Of a generation's time, what counts as latency when samplers are ranked. The whole of it is sufficient, nothing of it
necessary; in the one case that was simulated (S = 1, T_b = T_gen = 0.3 T, 1.64 times R / T was enough) 0.3 of it is
exact. It only says who is worth more than whom: how much is needed in all, the model says."""

RESERVE_DEVIATIONS = 1.645
"""Standard deviations of what is missing at any time that a set bears besides the mean: 95 % of a normal law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A sampler as one chooses among them. `useful_rollouts_per_s` is what counts towards what is needed, in the mean
    over the time, `variance` that of its coming and going."""

    name: str
    price_per_hour: float
    useful_rollouts_per_s: float
    variance: float = 0.0

    @property
    def ratio(self) -> float:
        return self.price_per_hour / self.useful_rollouts_per_s


def usable_share(demand: Demand, *, install_s: float, place_s: float) -> float:
    """Share of a step in which what a sampler begins is still trained on: ((S + 1 - kappa) T - L) / T within 0 and 1,
    its latency L being its own install and GENERATION_PART of what one place takes."""
    latency_s = install_s + GENERATION_PART * place_s
    slack_s = (demand.max_staleness + 1 - demand.publish_every_steps) * demand.train_step_s - latency_s
    return min(1.0, max(0.0, slack_s / demand.train_step_s))


def waiting_share(demand: Demand, *, install_s: float, place_s: float) -> float:
    """In the place of `usable_share` where the learner waits in any case, as at S = 0: T / (T + L), so that of equal
    rates those are preferred that delay a step less."""
    return demand.train_step_s / (demand.train_step_s + install_s + place_s)


def missing_share(*, departures_per_hour: float, replace_s: float) -> float:
    """Share of the time for which a sampler's place in the set is empty: departures come at a rate and each takes
    `replace_s` to notice and to fill."""
    missed = departures_per_hour * replace_s / HOUR_S
    return missed / (1.0 + missed)


def churn_variance(present_rollouts_per_s: float, missing: float) -> float:
    """Of what one sampler gives, which is missing for that share of the time: mu^2 p (1 - p)."""
    return present_rollouts_per_s**2 * missing * (1.0 - missing)


def churn_reserve(variance: float) -> float:
    """Rollouts per second beyond the mean that a set may lack at any time, with 95 % certainty, if its samplers are
    missing independently: 1.645 sqrt(sum of their variances).

    A whole class that leaves at once is not covered: to hold that in reserve would cost that class's price always.
    """
    return RESERVE_DEVIATIONS * math.sqrt(max(0.0, variance))


def traffic_per_hour(worker: Worker, *, down_bytes: float, up_bytes: float, versions_per_hour: float) -> float:
    """Price of the metered traffic that versions cause at a sampler. Rollouts are not counted: some kilobytes each."""
    per_version = down_bytes * worker.down_cost_per_gb + up_bytes * worker.up_cost_per_gb
    return versions_per_hour * per_version / GB


def start_per_hour(worker: Worker) -> float:
    """What its starts cost, spread over the sessions they begin: it is paid for `start_s` in which it gives nothing,
    once in 1 / `departures_per_hour` hours."""
    return worker.cost_per_hour * worker.start_s / HOUR_S * worker.departures_per_hour


def price_per_hour(worker: Worker, *, down_bytes: float, up_bytes: float, versions_per_hour: float) -> float:
    """All that it costs while active: its rent, its starts, and the traffic of versions."""
    traffic = traffic_per_hour(worker, down_bytes=down_bytes, up_bytes=up_bytes, versions_per_hour=versions_per_hour)
    return worker.cost_per_hour + start_per_hour(worker) + traffic


def fault_of(worker: Worker) -> str | None:
    """Why such a sampler can not be chosen whatever it costs, in one line for its owner; None if it can."""
    if not _is_least_zero((worker.cost_per_hour, worker.down_cost_per_gb, worker.up_cost_per_gb)):
        return "your prices must be numbers of at least 0: correct them and join again"
    if not _is_least_zero((worker.rollouts_per_s, worker.start_s, worker.departures_per_hour)):
        return "your rate, start time or departures are no numbers of at least 0: measure again"
    if worker.samples_at_once < 1:
        return "your engine says that it has no place for a sample: give it more memory or a smaller model"
    return None


def _is_least_zero(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in values)
