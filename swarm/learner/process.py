"""The trainer child, as the learner node calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarm.learner.messages import (
    AdapterRules,
    AlarmRules,
    Audit,
    Audited,
    AuditRollout,
    ComputeRules,
    Done,
    Flush,
    LearningRules,
    Prepare,
    Prepared,
    Save,
    Saved,
    Stage,
    Train,
    Trained,
    TrainGroup,
)
from swarm.process import START_S, Child
from swarm.settings import LeadConfig

S = TypeVar("S", bound=msgspec.Struct)
HANG_S = 600.0  # A trainer without progress for so long is restarted
MACHINES_START_S = 600.0  # Longest wait for trainer ranks on other machines, where somebody has to start them
ASSUMED_PROMPT_TOKENS = 2048  # For the memory preflight, unless one is set: the tokenizer comes with the model


class TrainerProcess:
    """Starts `swarm.learner.trainer` and calls it; files live under the run directory. `torchrun`: its options, to have
    several ranks; `say` gets lines about what takes long."""

    def __init__(
        self,
        run_dir: Path,
        *,
        hang_s: float = HANG_S,
        torchrun: tuple[str, ...] = (),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.files_dir = run_dir / "model"
        self.staging = run_dir / "staging.bin"
        self._child = Child(
            "trainer",
            "swarm.learner.ranks" if torchrun else "swarm.learner.trainer",
            *torchrun,
            log=run_dir / "logs" / "trainer.log",
            hang_s=hang_s,
            start_s=MACHINES_START_S if "--nnodes" in torchrun else START_S,
            say=say,
        )

    async def prepare(self, config: LeadConfig, longest_completion: int, resume: Path | None = None) -> Prepared:
        """Start the child and load the model, as of the checkpoint `resume` if one is given. UserError if there is no
        such model, or the checkpoint is of another one."""
        await self._child.start()
        places = {"files_dir": self.files_dir, "staging": self.staging}
        command = prepare_command(config, **places, longest_completion=longest_completion, resume=resume)
        return await self._child.call(command, Prepared)

    async def train(
        self, step: int, groups: list[TrainGroup], lineage: bytes = b"", learning_rate: float | None = None
    ) -> Trained:
        """One learner step. `lineage` is the digest of all batches with this one."""
        command = Train(step=step, groups=tuple(groups), lineage=lineage, learning_rate=learning_rate)
        return await self._child.call(command, Trained)

    async def audit(self, path: Path, rollouts: tuple[AuditRollout, ...], fast: bool) -> Audited:
        return await self._child.call(Audit(path=str(path), rollouts=rollouts, fast=fast), Audited)

    async def stage(self) -> Done:
        return await self._child.call(Stage(), Done)

    async def save(self, directory: Path, step: int) -> Done:
        """Begin to write a checkpoint of now. What became of it is told by the next `train`, or by `flush`."""
        return await self._child.call(Save(directory=str(directory), step=step), Done)

    async def flush(self) -> Saved:
        return await self._child.call(Flush(), Saved)

    async def stop(self) -> None:
        """End the child; a checkpoint that is being written is lost."""
        await self._child.stop()


def torchrun_options(config: LeadConfig) -> tuple[str, ...]:
    """What starts the trainer's ranks on this machine; none for one rank alone."""
    own = ("--nproc-per-node", str(config.trainer_ranks))
    if config.trainer_machines > 1:
        assert config.trainer_meeting is not None
        host, _, port = config.trainer_meeting.rpartition(":")
        # Machine 0 has rank 0, which the node speaks with.
        there = ("--nnodes", str(config.trainer_machines), "--node-rank", "0")
        return (*there, "--master-addr", host, "--master-port", port, *own)
    return ("--standalone", *own) if config.trainer_ranks > 1 else ()


def prepare_command(
    config: LeadConfig, *, files_dir: Path, staging: Path, longest_completion: int, resume: Path | None = None
) -> Prepare:
    return _from_config(
        Prepare,
        config,
        files_dir=str(files_dir),
        staging=str(staging),
        learning_rate=config.resolved_learning_rate,
        longest_prompt=config.max_prompt_tokens or ASSUMED_PROMPT_TOKENS,
        learning=_from_config(
            LearningRules,
            config,
            clip_low=config.resolved_clip[0],
            clip_high=config.resolved_clip[1],
            loss_normalisation=config.resolved_normalisation,
            longest_completion=longest_completion,
        ),
        compute=_from_config(ComputeRules, config, shares_beyond=0),
        # Alpha / rank scales the adapter: so it is the same at every rank.
        adapter=_from_config(AdapterRules, config, rank=config.adapter, alpha=2.0 * config.adapter)
        if config.adapter
        else None,
        alarms=AlarmRules(
            mismatch_kl=config.alarm_mismatch_kl,
            entropy=config.alarm_entropy,
            gradient_spike=config.alarm_gradient_spike,
        ),
        resume=str(resume) if resume else "",
    )


def _from_config(kind: type[S], config: LeadConfig, **others: Any) -> S:
    """A `kind` of `others` and of what the configuration says under the same names as its fields."""
    same = {name: getattr(config, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**same, **others)
