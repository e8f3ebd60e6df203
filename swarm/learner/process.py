"""The learner node's side of the trainer process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swarm.learner.messages import (
    MODEL,
    STAGING,
    Audit,
    Audited,
    AuditRollout,
    Done,
    Flush,
    Prepare,
    Prepared,
    Save,
    Saved,
    Stage,
    Train,
    Trained,
    TrainerConfig,
    TrainGroup,
)
from swarm.process import START_S, Child
from swarm.settings import LeadConfig

HANG_S = 600.0  # A trainer that reports no progress for this long is restarted
MACHINES_START_S = 600.0  # Longest wait for trainer ranks on other machines, where a person has to start them


class TrainerProcess(Child):
    """The child `swarm.learner.trainer`; its files are in the run directory. `torchrun` are torchrun's options, for
    several ranks. `say` gets lines about work that takes long. `stop` loses a checkpoint that is being written."""

    def __init__(
        self,
        run_dir: Path,
        *,
        hang_s: float = HANG_S,
        torchrun: tuple[str, ...] = (),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(
            "trainer",
            "swarm.learner.ranks" if torchrun else "swarm.learner.trainer",
            *torchrun,
            log=run_dir / "logs" / "trainer.log",
            hang_s=hang_s,
            start_s=MACHINES_START_S if "--nnodes" in torchrun else START_S,
            say=say,
        )
        self._run_dir = run_dir
        self.files_dir = run_dir / MODEL
        self.staging = run_dir / STAGING

    async def prepare(self, config: LeadConfig, longest_completion: int, resume: Path | None = None) -> Prepared:
        """Start the child and load the model, and the checkpoint `resume` if given. UserError if there is no such
        model, or the checkpoint belongs to another one."""
        await self.start()
        given = trainer_config(config, self._run_dir, longest_completion).model_dump(mode="json")
        return await self.call(Prepare(config=given, resume=str(resume) if resume else ""), Prepared)

    async def train(
        self, step: int, groups: list[TrainGroup], lineage: bytes = b"", learning_rate: float | None = None
    ) -> Trained:
        """Take one learner step. `lineage` is the digest of all batches up to this one."""
        command = Train(step=step, groups=tuple(groups), lineage=lineage, learning_rate=learning_rate)
        return await self.call(command, Trained)

    async def audit(self, path: Path, rollouts: tuple[AuditRollout, ...], fast: bool) -> Audited:
        return await self.call(Audit(path=str(path), rollouts=rollouts, fast=fast), Audited)

    async def stage(self) -> Done:
        return await self.call(Stage(), Done)

    async def save(self, directory: Path, step: int) -> Done:
        """Begin to write a checkpoint of the present state. The next `train`, or `flush`, returns whether it
        succeeded."""
        return await self.call(Save(directory=str(directory), step=step), Done)

    async def flush(self) -> Saved:
        return await self.call(Flush(), Saved)


def torchrun_options(config: LeadConfig) -> tuple[str, ...]:
    """torchrun's options for the trainer's ranks on this machine; none for a single rank."""
    own = ("--nproc-per-node", str(config.trainer_ranks))
    if config.trainer_machines is not None:
        count, _, meeting = config.trainer_machines.partition("@")
        host, _, port = meeting.rpartition(":")
        # Machine 0 has rank 0, which the node speaks with.
        there = ("--nnodes", count, "--node-rank", "0")
        return (*there, "--master-addr", host, "--master-port", port, *own)
    return ("--standalone", *own) if config.trainer_ranks > 1 else ()


def trainer_config(config: LeadConfig, run_dir: Path, longest_completion: int) -> TrainerConfig:
    known = {"run_dir": run_dir, "longest_completion": longest_completion}
    return TrainerConfig.model_validate(config.model_dump() | known)
