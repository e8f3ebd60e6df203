"""What the capacity model needs to know: completion lengths, samplers, the learner's demand, the cost of a version.

Rates are per second, prices per hour, traffic prices per GB (1e9 bytes). All prices share one unnamed currency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

from swarm.types import Freshness

MAX_LENGTHS = 64  # Equally likely lengths that represent a distribution; they still include its 99th percentile
MAX_NODES = 4096  # Samplers known at a time, as many as in the table of leases
GB = 1e9


class Terms(NamedTuple):
    """What a sampler is and costs: an hour, a GB to it, a GB from it."""

    device_class: str
    prices: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long completions are: equally likely token counts, ascending, at least one, all positive."""

    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.tokens[0] > 0
        assert list(self.tokens) == sorted(self.tokens)

    @staticmethod
    def of(tokens: Sequence[float]) -> Lengths:
        """Return the lengths of observed completions. Raise ValueError if there are none."""
        if not tokens:
            raise ValueError("no lengths were observed")
        ordered = sorted(tokens)
        if len(ordered) <= MAX_LENGTHS:
            return Lengths(tokens=tuple(ordered))
        return Lengths(tokens=tuple(ordered[int((i + 0.5) * len(ordered) / MAX_LENGTHS)] for i in range(MAX_LENGTHS)))

    @staticmethod
    def lognormal(*, median: float, sigma: float, cap: float = math.inf) -> Lengths:
        """Return the middles of MAX_LENGTHS equally likely slices, cut at `cap`. Sigma 0 gives one length."""
        if sigma == 0:
            return Lengths(tokens=(min(cap, median),))
        normal = NormalDist(math.log(median), sigma)
        middles = (normal.inv_cdf((i + 0.5) / MAX_LENGTHS) for i in range(MAX_LENGTHS))
        return Lengths(tokens=tuple(min(cap, math.exp(middle)) for middle in middles))

    @property
    def mean(self) -> float:
        return fmean(self.tokens)


def mean_longest(lengths: Sequence[float], count: int) -> float:
    """Return the mean of the longest of `count` lengths: the i-th of n ascending lengths is the longest with
    probability (i/n)^count - ((i-1)/n)^count."""
    most = len(lengths)
    return sum(length * ((i / most) ** count - ((i - 1) / most) ** count) for i, length in enumerate(lengths, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One sampler.

    `rollouts_per_s` is measured with this model at full load: it depends on the room that the weights leave for the KV
    cache, not on the card's name. `claimed_rollouts_per_s` is 0 unless nobody of its class has proven a rate yet; then
    it is the sampler's own claim, and `rollouts_per_s` is the part of it that counts.

    Its engine has `samples_at_once` places. In `lockstep` they start and end together (transformers), otherwise each
    runs on its own (vLLM). A link of 0 is unknown, a price of 0 is free. `start_s` is the time from a decision to its
    first sample (loading and the first full version). `departures_per_hour` is how often a sampler of its class
    vanishes.
    """

    name: str
    device_class: str = ""
    rollouts_per_s: float
    claimed_rollouts_per_s: float = 0.0
    samples_at_once: int = 1
    lockstep: bool = False
    cost_per_hour: float = 0.0
    down_cost_per_gb: float = 0.0
    up_cost_per_gb: float = 0.0
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    public: bool = False
    start_s: float = 0.0
    departures_per_hour: float = 0.0

    @property
    def place_s(self) -> float:
        """Mean time of one place for one sample, or in lockstep for the longest of a batch."""
        return self.samples_at_once / self.rollouts_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the learner needs. `publish_every_steps` is ECHO-2's kappa, `max_staleness` its S. `freshness` decides how
    early groups are opened, as the setting of that name."""

    train_step_s: float
    groups_per_step: int
    group_size: int
    publish_every_steps: int
    max_staleness: int
    lengths: Lengths
    freshness: Freshness = "adaptive"

    @property
    def rollouts_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def period_s(self) -> float:
        """Seconds from one version to the next if the learner never waits."""
        return self.publish_every_steps * self.train_step_s

    @property
    def max_latency_s(self) -> float:
        """(S + 1 - kappa) T: what a version's way to a sampler and a generation may take together."""
        return (self.max_staleness + 1 - self.publish_every_steps) * self.train_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Dissemination:
    """How one version reaches a set of workers, in their order: the seconds from its publication to each install, the
    bytes that each worker receives and sends on, and the bytes that the learner sends."""

    install_s: tuple[float, ...]
    down_bytes: tuple[float, ...]
    up_bytes: tuple[float, ...]
    learner_up_bytes: float

    @property
    def broadcast_s(self) -> float:
        """Seconds until the last worker has installed it."""
        return max(self.install_s, default=0.0)


Disseminate = Callable[[Sequence[Worker]], Dissemination]
"""Plans how a version reaches a set of workers; swarm/pay/delivery.py makes such functions."""
