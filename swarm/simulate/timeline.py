"""What a simulated swarm looked like over time: for a picture, and for whoever wants the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

POINTS = 600  # Moments of a run at which the swarm is looked at: more would not be seen in a picture


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """One batch: when it was taken, how long it was waited for, how old it was, and what the step before it cost."""

    at_s: float
    waited_s: float
    mean_staleness: float
    max_staleness: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The swarm at one moment. `used_share` is of the places of active samplers, since the moment before."""

    at_s: float
    there: int
    ready: int
    active: int
    used_share: float
    cost_per_hour: float


@dataclass(frozen=True, slots=True)
class Carried:
    """A version on its way, until its last active sampler had it."""

    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that a reader of the picture will ask about."""

    at_s: float
    text: str


@dataclass(slots=True)
class Timeline:
    """All of it, in order of time. `waiting_since_s`: the learner waits at the end, since then."""

    steps: list[StepTaken] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    versions: list[Carried] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    waiting_since_s: float | None = None
