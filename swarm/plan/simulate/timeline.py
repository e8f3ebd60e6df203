"""A simulated swarm over time: the numbers for a picture, and for other readers."""

from __future__ import annotations

from dataclasses import dataclass, field

POINTS = 600  # Moments of a run at which the swarm is sampled: a picture would not show more


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """One batch: when it was taken, how long it was waited for, how old it was, and what the previous step cost."""

    at_s: float
    waited_s: float
    mean_staleness: float
    max_staleness: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The swarm at one moment. `used_share` is of the active samplers' places, since the previous moment."""

    at_s: float
    there: int
    ready: int
    active: int
    used_share: float
    cost_per_hour: float


@dataclass(frozen=True, slots=True)
class Carried:
    """The time from a version's departure until its last active sampler had it."""

    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Mark:
    """An event that a reader of the picture will ask about."""

    at_s: float
    text: str


@dataclass(slots=True)
class SimulatedTimeline:
    """Everything in order of time."""

    steps: list[StepTaken] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    versions: list[Carried] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
