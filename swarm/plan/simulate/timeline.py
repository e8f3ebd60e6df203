"""A simulated swarm over time."""

from __future__ import annotations

from dataclasses import dataclass, field

POINTS = 600  # Moments of a run at which the swarm is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """One batch: when it was taken, and how long it was waited for."""

    at_s: float
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How many samplers are there at one moment, or on offer, and how many are active with weights."""

    at_s: float
    there: int
    active: int


@dataclass(frozen=True, slots=True)
class Carried:
    """The time from a version's departure until its last active sampler had it."""

    from_s: float
    to_s: float


@dataclass(slots=True)
class SimulatedTimeline:
    """Everything in order of time."""

    steps: list[StepTaken] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    versions: list[Carried] = field(default_factory=list)
