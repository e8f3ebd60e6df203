"""The trainer child, as the learner node calls it."""

from __future__ import annotations

from pathlib import Path

from swarm.child import Child
from swarm.config import LeadConfig
from swarm.learner.messages import Done, Prepare, Prepared, Save, Stage, Train, Trained, TrainGroup


class TrainerProcess:
    """Starts `swarm.learner.trainer` and calls it; files live under the run directory."""

    def __init__(self, run_dir: Path, *, hang_s: float) -> None:
        self.files_dir = run_dir / "model"
        self.staging = run_dir / "staging.bin"
        self._child = Child("trainer", "swarm.learner.trainer", log=run_dir / "logs" / "trainer.log", hang_s=hang_s)

    async def prepare(self, config: LeadConfig) -> Prepared:
        """Start the child and load the model. UserError if there is no such model."""
        await self._child.start()
        command = Prepare(
            model=config.model,
            files_dir=str(self.files_dir),
            staging=str(self.staging),
            seed=config.seed,
            device=config.device,
            learning_rate=config.resolved_learning_rate,
            warmup_steps=config.warmup_steps,
            minibatches=config.minibatches,
            temperature=config.temperature,
        )
        return await self._child.call(command, Prepared)

    async def train(self, step: int, groups: list[TrainGroup]) -> Trained:
        """One learner step."""
        return await self._child.call(Train(step=step, groups=tuple(groups)), Trained)

    async def stage(self) -> Done:
        """Write the weights to the staging file."""
        return await self._child.call(Stage(), Done)

    async def save(self, directory: Path) -> Done:
        """Write a Hugging Face checkpoint."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        return await self._child.call(Save(directory=str(directory)), Done)

    async def stop(self) -> None:
        await self._child.stop()
