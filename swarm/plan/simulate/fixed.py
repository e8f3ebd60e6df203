"""A fleet that stays, on the real rollout plane and a virtual clock: what `plan` says of a set, and how predictions are
checked. It shares no code with the closed form but the mean of the longest of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from swarm.pay.fleet import Demand, Worker
from swarm.plan.simulate.desk import Desk
from swarm.plan.simulate.learner import CapacityFigures, SimulatedLearner, StepSums, figures_between, tally_of
from swarm.plan.simulate.sampler import Occupancy, Sampler
from swarm.plan.simulate.world import World


def run_fixed(
    demand: Demand,
    workers: Sequence[Worker],
    install_s: Sequence[float],
    *,
    steps: int,
    seed: int,
    warmup_steps: int,
) -> CapacityFigures:
    """`steps` learner steps after the warm-up with a fleet that stays. `install_s[i]`: from the publication of a
    version to its install by worker i."""
    assert len(workers) == len(install_s)
    run = FixedRun(demand, workers, install_s, seed=seed)
    run.until(warmup_steps)
    before = run.tally()
    run.until(warmup_steps + steps)
    return figures_between(before, run.tally(), demand, run.world.trace_digest())


class FixedRun:
    """A learner and a fleet that stays."""

    def __init__(self, demand: Demand, workers: Sequence[Worker], install_s: Sequence[float], *, seed: int) -> None:
        self.world = World(Random(seed))
        self.desk = Desk(demand, seed=seed)
        self.occupancy = Occupancy()
        self.learner = SimulatedLearner(demand, world=self.world, desk=self.desk, publish=self._publish)
        self._install_s = install_s
        self._samplers = [
            Sampler(
                worker,
                lengths=demand.lengths,
                world=self.world,
                desk=self.desk,
                occupancy=self.occupancy,
                over=self.learner.look,
            )
            for worker in workers
        ]
        self.learner.publish(0)
        for sampler in self._samplers:
            sampler.activate()

    def until(self, steps: int) -> None:
        """Run until `steps` steps are done, or nothing is left that could happen."""
        self.world.run_until(lambda: self.learner.steps >= steps)

    def tally(self) -> StepSums:
        return tally_of(self.learner, self.desk, self.occupancy, now=self.world.now)

    def _publish(self, version: int) -> None:
        for sampler, delay_s in zip(self._samplers, self._install_s, strict=True):
            if version == 0:
                sampler.install(0)
            else:
                self.world.schedule(delay_s, "install", partial(sampler.install, version))
