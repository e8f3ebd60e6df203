"""The learner of a simulated swarm: its batches, steps and publications, and how it spends its time.

Theory of operation. `Learner` takes a batch from the real rollout plane (desk.Desk), trains for `train_step_s`,
publishes every `publish_every_steps`, and takes the next batch as soon as it is ready; the wait in between is its idle
time. Everything depends only on the arguments and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.pay.fleet import Demand
from swarm.plan.simulate.desk import Counts, Desk
from swarm.plan.simulate.sampler import Occupancy
from swarm.plan.simulate.world import World
from swarm.types import Rollout, VersionId

MIN_WARMUP_STEPS = 10


def warmup_steps(demand: Demand) -> int:
    """Return how many steps are left out of all figures: at least 2 (S + 1 + kappa). Until then the first version is
    fresh enough, and a fleet that is too slow lives on rollouts that it made in advance."""
    return max(MIN_WARMUP_STEPS, 2 * (demand.max_staleness + 1 + demand.publish_every_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityFigures:
    """Measured after the warm-up. `idle_share` is of the learner's time, `discarded_share` of the generated rollouts,
    `mean_staleness` over the trained rollouts. `step_s` is the time from batch to batch; `rollouts_per_s` counts
    trained rollouts. A learner that gets no more batches is idle (1.0)."""

    idle_share: float
    discarded_share: float
    mean_staleness: float
    samplers_idle_share: float
    step_s: float
    rollouts_per_s: float
    rollouts: int
    steps: int
    trace_digest: str


@dataclass(slots=True, kw_only=True)
class StepSums:
    """Sums up to a moment; figures come from the difference of two."""

    at: float = 0.0
    steps: int = 0
    idle_s: float = 0.0
    counts: Counts
    place_s: float = 0.0
    used_s: float = 0.0


class SimulatedLearner:
    """Batches, steps and publications. `publish` is called with each version, `taken` with each batch and the seconds
    that the learner waited for it."""

    def __init__(
        self,
        demand: Demand,
        *,
        world: World,
        desk: Desk,
        publish: Callable[[int], None],
        taken: Callable[[list[Rollout], float], None] | None = None,
    ) -> None:
        self.demand = demand
        self.steps = 0
        self.idle_s = 0.0
        self.waiting_since: float | None = 0.0
        self._world = world
        self._desk = desk
        self._publish = publish
        self._taken = taken

    def publish(self, version: int) -> None:
        self._desk.plane.published(VersionId(incarnation=0, version=version))
        self._publish(version)

    def look(self) -> None:
        """Take a batch if it is ready, and retry waiting questions if anything changed."""
        if self.waiting_since is not None and (batch := self._desk.take(now=self._world.now)) is not None:
            waited_s = self._world.now - self.waiting_since
            self.idle_s += waited_s
            self.waiting_since = None
            self._world.schedule(self.demand.train_step_s, "trained", self._trained)
            self._desk.retry()
            if self._taken is not None:
                self._taken(batch, waited_s)
        elif self._desk.changed():
            self._desk.retry()

    def _trained(self) -> None:
        self.steps += 1
        self.waiting_since = self._world.now
        if self.steps % self.demand.publish_every_steps == 0:
            self.publish(self.steps)
        self.look()


def tally_of(learner: SimulatedLearner, desk: Desk, occupancy: Occupancy, *, now: float) -> StepSums:
    """Return all sums as they are now."""
    occupancy.change(now=now)
    waited_s = 0.0 if learner.waiting_since is None else now - learner.waiting_since
    return StepSums(
        at=now,
        steps=learner.steps,
        idle_s=learner.idle_s + waited_s,
        counts=replace(desk.counts),
        place_s=occupancy.place_s,
        used_s=occupancy.used_s,
    )


def figures_between(before: StepSums, after: StepSums, demand: Demand, digest: str) -> CapacityFigures:
    """Return what was measured between two moments, either of which may be within a step."""
    was, now = before.counts, after.counts
    passed_s, idle_s = after.at - before.at, after.idle_s - before.idle_s
    busy_s = passed_s - idle_s
    step_s = demand.train_step_s * passed_s / busy_s if busy_s > 0 else math.inf
    place_s = after.place_s - before.place_s
    generated = now.generated - was.generated
    return CapacityFigures(
        idle_share=idle_s / passed_s if busy_s > 0 else 1.0,
        discarded_share=(now.discarded - was.discarded) / max(1, generated),
        mean_staleness=(now.staleness - was.staleness) / max(1, now.trained - was.trained),
        samplers_idle_share=1 - (after.used_s - before.used_s) / place_s if place_s else 0.0,
        step_s=step_s,
        rollouts_per_s=demand.rollouts_per_step / step_s,
        rollouts=generated,
        steps=after.steps - before.steps,
        trace_digest=digest,
    )
