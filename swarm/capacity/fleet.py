"""What the capacity model has to know: lengths of completions, samplers, what the learner needs, what a version costs.

Rates are per second, prices per hour, traffic prices per GB (1e9 bytes), all in one currency that nobody names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

MAX_LENGTHS = 64  # Equally likely lengths that stand for a distribution: its 99th percentile is still among them
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long completions are: equally likely numbers of tokens, ascending, at least one, all positive."""

    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.tokens[0] > 0
        assert list(self.tokens) == sorted(self.tokens)

    @staticmethod
    def of(tokens: Sequence[float]) -> Lengths:
        """Those of observed completions; ValueError where there are none."""
        if not tokens:
            raise ValueError("no lengths were observed")
        ordered = sorted(tokens)
        if len(ordered) <= MAX_LENGTHS:
            return Lengths(tokens=tuple(ordered))
        return Lengths(tokens=tuple(ordered[int((i + 0.5) * len(ordered) / MAX_LENGTHS)] for i in range(MAX_LENGTHS)))

    @staticmethod
    def lognormal(*, median: float, sigma: float, cap: float = math.inf) -> Lengths:
        """Lognormal, cut at `cap`: the middles of MAX_LENGTHS equally likely slices. Sigma 0 is one length."""
        if sigma == 0:
            return Lengths(tokens=(min(cap, median),))
        normal = NormalDist(math.log(median), sigma)
        middles = (normal.inv_cdf((i + 0.5) / MAX_LENGTHS) for i in range(MAX_LENGTHS))
        return Lengths(tokens=tuple(min(cap, math.exp(middle)) for middle in middles))

    @property
    def mean(self) -> float:
        return fmean(self.tokens)


def mean_longest(lengths: Sequence[float], count: int) -> float:
    """Mean of the longest of `count` lengths: the i-th of n ascending ones is it with (i/n)^count - ((i-1)/n)^count."""
    most = len(lengths)
    return sum(length * ((i / most) ** count - ((i - 1) / most) ** count) for i, length in enumerate(lengths, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One sampler. `rollouts_per_s` is what it measured with this model, at full load: the room that the weights leave
    for the KV cache decides it, not the card's name. `claimed_rollouts_per_s` is 0, except where nobody of its class
    has shown yet what it can do: then it is what the sampler says, and `rollouts_per_s` how much of that is counted on.

    Its engine has `samples_at_once` places; `lockstep`: they are filled together and end together (transformers), else
    each goes on alone (vLLM). 0 is unknown for links, free for prices. `start_s` is from a decision to its first sample
    (load and first full version), `departures_per_hour` how often one of its class goes without a word.
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
        """Mean time that one place takes for what it does at once: a sample, or in lockstep the longest of a batch."""
        return self.samples_at_once / self.rollouts_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the learner needs. `publish_every_steps` is ECHO-2's kappa, `max_staleness` its S."""

    train_step_s: float
    groups_per_step: int
    group_size: int
    publish_every_steps: int
    max_staleness: int
    lengths: Lengths

    @property
    def rollouts_per_step(self) -> int:
        return self.groups_per_step * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Dissemination:
    """What one version takes to reach a set of workers, in their order: seconds from its publication to each install,
    bytes that each receives and sends on, and bytes that the learner sends."""

    install_s: tuple[float, ...]
    down_bytes: tuple[float, ...]
    up_bytes: tuple[float, ...]
    learner_up_bytes: float

    @property
    def broadcast_s(self) -> float:
        """Until the last of them has installed it."""
        return max(self.install_s, default=0.0)


Disseminate = Callable[[Sequence[Worker]], Dissemination]
"""The planner's answer for a set of workers; swarm/capacity/delivery.py makes one."""
