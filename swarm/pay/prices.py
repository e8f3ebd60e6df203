"""What a sampler costs and contributes, as pure functions: the figures by which samplers are ranked.

Prices are per hour in the currency of the fleet, traffic prices per GB, rates in rollouts per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.pay.fleet import GB, Demand, Worker

HOUR_S = 3600.0

GENERATION_PART = 0.3
"""Part of a generation's time that counts as latency in the ranking. All of it is sufficient, none of it is necessary;
0.3 is exact in the one case that was simulated (S = 1, T_b = T_gen = 0.3 T, 1.64 times R / T was enough). It only ranks
samplers; the model says how much is needed in total."""

RESERVE_DEVIATIONS = 1.645
"""Standard deviations of the missing rate that a set must bear besides the mean: 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOffer:
    """A sampler as the search sees it. `useful_rollouts_per_s` is its mean contribution to the required rate,
    `variance` the variance of that, caused by its absences."""

    name: str
    price_per_hour: float
    useful_rollouts_per_s: float
    variance: float = 0.0

    @property
    def ratio(self) -> float:
        return self.price_per_hour / self.useful_rollouts_per_s


def usable_share(demand: Demand, *, install_s: float, place_s: float) -> float:
    """Return the share of a step whose rollouts are still trained on: ((S + 1 - kappa) T - L) / T, clamped to 0 and 1.
    The latency L is the sampler's install time plus GENERATION_PART of the time that one place takes."""
    slack_s = demand.max_latency_s - (install_s + GENERATION_PART * place_s)
    return min(1.0, max(0.0, slack_s / demand.train_step_s))


def waiting_share(demand: Demand, *, install_s: float, place_s: float) -> float:
    """Return T / (T + L), which replaces `usable_share` if the learner waits in any case, as at S = 0. Among equal
    rates it prefers samplers that delay a step less."""
    return demand.train_step_s / (demand.train_step_s + install_s + place_s)


def missing_share(*, departures_per_hour: float, replace_s: float) -> float:
    """Return the share of the time for which a sampler's place in the set is empty. Each departure takes `replace_s` to
    notice and to fill."""
    missed = departures_per_hour * replace_s / HOUR_S
    return missed / (1.0 + missed)


def churn_variance(present_rollouts_per_s: float, missing: float) -> float:
    """Return the variance of one sampler's contribution: mu^2 p (1 - p), where p is its missing share."""
    return present_rollouts_per_s**2 * missing * (1.0 - missing)


def churn_reserve(variance: float) -> float:
    """Return the rate beyond the mean that a set may lack at any time, with 95 % certainty, if its samplers are missing
    independently: 1.645 sqrt(sum of their variances).

    A whole class that leaves at once is not covered: that reserve would always cost as much as the class.
    """
    return RESERVE_DEVIATIONS * math.sqrt(max(0.0, variance))


def traffic_per_hour(worker: Worker, *, down_bytes: float, up_bytes: float, versions_per_hour: float) -> float:
    """Return the price of the metered traffic of versions at a sampler. Rollouts are kilobytes and not counted."""
    per_version = down_bytes * worker.down_cost_per_gb + up_bytes * worker.up_cost_per_gb
    return versions_per_hour * per_version / GB


def start_per_hour(worker: Worker) -> float:
    """Return the cost of its starts per hour: each is `start_s` of rent without output, `departures_per_hour` times an
    hour."""
    return worker.cost_per_hour * worker.start_s / HOUR_S * worker.departures_per_hour


def price_per_hour(worker: Worker, *, down_bytes: float, up_bytes: float, versions_per_hour: float) -> float:
    """Return its full price while active: rent, starts, and the traffic of versions."""
    traffic = traffic_per_hour(worker, down_bytes=down_bytes, up_bytes=up_bytes, versions_per_hour=versions_per_hour)
    return worker.cost_per_hour + start_per_hour(worker) + traffic


def fault_of(worker: Worker) -> str | None:
    """Return why this sampler can never be chosen, in one line for its owner, or None if it can."""
    if not _is_least_zero((worker.cost_per_hour, worker.down_cost_per_gb, worker.up_cost_per_gb)):
        return "your prices must be numbers of at least 0: correct them and join again"
    if not _is_least_zero((worker.rollouts_per_s, worker.start_s, worker.departures_per_hour)):
        return "your rate, start time or departures are no numbers of at least 0: measure again"
    if worker.samples_at_once < 1:
        return "your engine says that it has no place for a sample: give it more memory or a smaller model"
    return None


def _is_least_zero(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in values)
