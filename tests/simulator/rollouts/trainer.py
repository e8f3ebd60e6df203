"""The trainer's process: weights that are a digest over all that they were trained on, and checkpoints of them.

Theory of operation. A life begins with the newest checkpoint. It trains on one batch at a time and keeps no other state
than its step and its weights; every few steps it writes a checkpoint beside its work, which is whole after a random
delay. Training on the same batches in the same order gives the same digest, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.plan.simulate.world import Callback, World
from tests.simulator.rollouts.disk import Disk
from tests.simulator.rollouts.ledger import ScoredRollout, content_of
from tests.simulator.rollouts.scenario import Scenario


class Trainer:
    """One trainer after another; `step` counts the steps in its `weights`."""

    def __init__(self, world: World, scenario: Scenario, disk: Disk) -> None:
        self._world = world
        self._scenario = scenario
        self._disk = disk
        self._life = 0
        self._saving: tuple[int, bytes] | None = None
        self.step, self.weights = disk.checkpoint

    def train(self, batch: Sequence[ScoredRollout], then: Callback) -> None:
        """One step; `then` runs at its end unless the trainer dies before."""
        life = self._life

        def trained() -> None:
            if life == self._life:
                self.weights = content_of(batch, self.weights)
                self.step += 1
                if self.step % self._scenario.checkpoint_every_steps == 0:
                    self._save()
                then()

        self._world.schedule(self._scenario.train_step_s, "trained", trained)

    def restart(self, *, saves: bool) -> None:
        """A new process, which goes on from the newest checkpoint. `saves`: its forerunner outlived the node for long
        enough to end a checkpoint that it had begun."""
        self._life += 1
        if saves and self._saving is not None:
            self._disk.checkpoint = self._saving
        self._saving = None
        self.step, self.weights = self._disk.checkpoint

    def _save(self) -> None:
        life, saved = self._life, (self.step, self.weights)
        self._saving = saved

        def whole() -> None:
            if life == self._life and saved[0] > self._disk.checkpoint[0]:
                self._disk.checkpoint = saved

        self._world.schedule(self._world.random.uniform(0.0, 2 * self._scenario.checkpoint_s), "checkpoint", whole)
