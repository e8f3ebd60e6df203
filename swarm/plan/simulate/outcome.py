"""The settings of a whole-swarm simulation, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from swarm.pay.cost import CostFigures
from swarm.pay.prices import HOUR_S
from swarm.plan.simulate.downloads import Traffic
from swarm.plan.simulate.learner import CapacityFigures, StepSums
from swarm.plan.simulate.timeline import SimulatedTimeline

LEARNER = "learner"  # The class of the learner's own costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to simulate of a scenario."""

    hours: float
    max_staleness: int
    publish_every_steps: int


@dataclass(slots=True, kw_only=True)
class Happened:
    """What happened to the fleet since the start. `joins` are transfers of a first or a missed version."""

    joins: int = 0
    left: int = 0
    vanished: int = 0
    activated: int = 0
    stood_by: int = 0
    rollouts_lost: int = 0
    rollouts_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmFigures:
    """Measured after the warm-up, `happened` since the start. `broadcast_s` is the mean time until a version reaches
    its last active sampler; `active` and `there` are means over time."""

    hours: float
    capacity: CapacityFigures
    cost_per_step: float
    cost_per_hour: float
    cost_per_million_tokens: float
    cost_per_hour_by_class: dict[str, float]
    rollouts_by_class: dict[str, int]
    active: float
    there: float
    broadcast_s: float
    broadcast_bytes_per_hour: float
    join_bytes_per_hour: float
    learner_up_bytes_per_hour: float
    happened: Happened


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """All sums at one moment. `moments` counts the timeline's moments until then."""

    tally: StepSums
    costs: CostFigures
    traffic: Traffic
    moments: int


def figures_of(
    before: Sums, after: Sums, timeline: SimulatedTimeline, *, capacity: CapacityFigures, happened: Happened
) -> SwarmFigures:
    """Return what was measured between two moments."""
    moments = timeline.moments[before.moments : after.moments]
    carried_s = [one.to_s - one.from_s for one in timeline.versions if one.from_s >= before.tally.at]
    was, now = before.costs, after.costs
    cost_was, cost_now = _cost_by_class(was), _cost_by_class(now)
    hours = (after.tally.at - before.tally.at) / HOUR_S
    sent, later = before.traffic, after.traffic
    cost = now.total - was.total
    return SwarmFigures(
        hours=hours,
        capacity=capacity,
        cost_per_step=cost / hours * capacity.step_s / HOUR_S,
        cost_per_hour=cost / hours,
        cost_per_million_tokens=cost / max(1.0, now.tokens - was.tokens) * 1e6,
        cost_per_hour_by_class={name: (spent - cost_was.get(name, 0.0)) / hours for name, spent in cost_now.items()},
        rollouts_by_class={
            name: tally.rollouts - (was.by_class[name].rollouts if name in was.by_class else 0)
            for name, tally in now.by_class.items()
        },
        active=fmean(moment.active for moment in moments),
        there=fmean(moment.there for moment in moments),
        broadcast_s=fmean(carried_s) if carried_s else 0.0,
        broadcast_bytes_per_hour=(later.broadcast_bytes - sent.broadcast_bytes) / hours,
        join_bytes_per_hour=(later.join_bytes - sent.join_bytes) / hours,
        learner_up_bytes_per_hour=(later.learner_up_bytes - sent.learner_up_bytes) / hours,
        happened=happened,
    )


def _cost_by_class(figures: CostFigures) -> dict[str, float]:
    by_class = {name: tally.cost for name, tally in figures.by_class.items()}
    return {LEARNER: figures.total - sum(by_class.values()), **by_class}
