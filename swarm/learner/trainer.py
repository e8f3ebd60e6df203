"""The trainer's process: `python -m swarm.learner.trainer`, started by the learner node. Reads top to bottom."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch

from swarm.broadcast.manifest import TensorSpec
from swarm.child import ChildChannel
from swarm.config import TINY
from swarm.learner.checkpoint import (
    layout_of,
    load_model,
    save_small_files,
    stream_tensors,
    write_staging,
)
from swarm.learner.device import SMALL_MODEL_PARAMETERS, pick_device
from swarm.learner.memory import (
    check_weights,
    count_parameters,
    described,
    fit,
    read_free_bytes,
    read_free_host_bytes,
)
from swarm.learner.messages import (
    Command,
    ComputeRules,
    Done,
    Flush,
    Prepare,
    Prepared,
    Save,
    Saved,
    Stage,
    Train,
    Trained,
)
from swarm.learner.policy import Policy, arrange
from swarm.learner.ranks import Ranks
from swarm.learner.saving import Parts, Saver, restore, take, write
from swarm.learner.update import Learning, Update

ADAM_BETAS = (0.9, 0.95)


class Trainer:
    """Model, optimiser and tokenizer of one run."""

    def __init__(self, command: Prepare, channel: ChildChannel) -> None:
        self._channel = channel
        self._command = command
        self._device = pick_device(command.device)
        with channel.alive():
            self._check_weights()
            self._model, self._tokenizer = load_model(command.model, command.seed)
        self._parameters = sum(p.numel() for p in self._model.parameters())
        if self._parameters < SMALL_MODEL_PARAMETERS:
            torch.set_num_threads(1)
        self._model.to(self._device).train()
        torch.manual_seed(command.seed)
        self._shuffle = torch.Generator().manual_seed(command.seed)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=command.learning_rate, betas=ADAM_BETAS, weight_decay=0.0
        )
        self._tensors: dict[TensorSpec, torch.Tensor] = stream_tensors(self._model)
        self._parts = Parts(model=self._model, optimizer=self._optimizer, shuffle=self._shuffle, device=self._device)
        self._update = self._make_update()
        self._saver = Saver()
        self._resumed_step, self._lineage = self._resume(command.resume) if command.resume else (0, b"")
        self.steps_taken = self._resumed_step

    def prepared(self) -> Prepared:
        """Save the small files, stage the weights and describe the model."""
        files = save_small_files(self._model, self._tokenizer, Path(self._command.files_dir))
        write_staging(self._tensors, Path(self._command.staging))
        config = self._model.config
        return Prepared(
            layout=layout_of(self._tensors, files),
            parameters=self._parameters,
            vocab_size=config.vocab_size,
            context_tokens=config.max_position_embeddings,
            stop_token_ids=_stop_token_ids(self._model),
            device=str(self._device),
            step=self._resumed_step,
            lineage=self._lineage,
            notes=self._notes,
        )

    def step(self, command: Train) -> Trained:
        """One learner step: a few optimiser steps over the batch, or none if no group has any variance."""
        began = time.monotonic()
        figures, alarms = self._update.step(command.groups, command.step)
        self._lineage = command.lineage
        self.steps_taken = command.step + 1
        self._rehearse(began, command.step)
        saved = self._saver.report()
        return Trained(
            metrics=figures,
            seconds=time.monotonic() - began,
            saved_step=saved.step,
            save_fault=saved.fault,
            alarms=alarms,
        )

    def _check_weights(self) -> None:
        """Refuse a model that is too large before it is loaded."""
        parameters = count_parameters(self._command.model) if self._command.model != TINY else None
        if parameters is None or parameters < SMALL_MODEL_PARAMETERS:
            return
        check_weights(
            parameters,
            ranks=1,
            free_bytes=read_free_bytes(self._device, ranks=1),
            host_bytes=read_free_host_bytes(),
            device=str(self._device),
        )

    def _make_update(self) -> Update:
        command, channel = self._command, self._channel
        policy = Policy(self._model, command.compute, temperature=command.temperature)
        compute, self._notes = self._settle(policy)
        arrange(self._model, compute)
        reference = None
        if command.learning.kl_weight:
            # The model that the run began with, whatever checkpoint it goes on from.
            with channel.alive():
                frozen, _ = load_model(command.model, command.seed)
            frozen.to(self._device).eval().requires_grad_(False)
            reference = Policy(frozen, compute, temperature=command.temperature)
            reference.settle(compute, self._device)
        return Update(
            msgspec.structs.replace(command, compute=compute),
            Learning(
                model=self._model,
                optimizer=self._optimizer,
                shuffle=self._shuffle,
                policy=policy,
                reference=reference,
                ranks=Ranks(),
                device=self._device,
                progress=channel.progress,
            ),
        )

    def _settle(self, policy: Policy) -> tuple[ComputeRules, tuple[str, ...]]:
        """How steps are computed, and lines about it. A small model takes a minibatch at once and always fits."""
        command = self._command
        compute, notes = policy.settle(command.compute, self._device)
        if self._parameters < SMALL_MODEL_PARAMETERS:
            return compute, notes
        fitted = fit(
            policy,
            compute,
            self._device,
            read_free_bytes(self._device, ranks=1),
            ranks=1,
            longest=command.learning.longest_completion,
            kl=bool(command.learning.kl_weight),
        )
        return fitted, (*notes, described(fitted, self._device))

    def _rehearse(self, began: float, step: int) -> None:
        """Take as long as a large model would: a rehearsal of its swarm with a small one."""
        noise = self._command.rehearse_noise * Random(f"step {self._command.seed} {step}").uniform(-1, 1)
        left_s = began + self._command.rehearse_step_s * (1 + noise) - time.monotonic()
        if left_s > 0:
            with self._channel.alive():
                time.sleep(left_s)

    def stage(self) -> Done:
        write_staging(self._tensors, Path(self._command.staging))
        return Done()

    def save(self, command: Save) -> Done:
        """Copy what a checkpoint holds; the copy is written while training goes on."""
        with self._channel.alive():
            self._saver.wait()
            snapshot = take(self._parts, step=command.step, lineage=self._lineage, alarms=self._update.alarms.state)
        self._saver.start(command.step, lambda: write(snapshot, self._model, self._tokenizer, Path(command.directory)))
        return Done()

    def flush(self) -> Saved:
        """Wait for the save that is under way."""
        with self._channel.alive():
            self._saver.wait()
        return self._saver.report()

    def _resume(self, directory: str) -> tuple[int, bytes]:
        with self._channel.alive():
            state = restore(self._parts, Path(directory))
        self._update.alarms.state = state.alarms
        return state.step, bytes.fromhex(state.lineage)


def _stop_token_ids(model: Any) -> tuple[int, ...]:
    stops = model.generation_config.eos_token_id
    if stops is None:
        stops = model.config.eos_token_id
    if stops is None:
        return ()
    return (int(stops),) if isinstance(stops, int) else tuple(int(stop) for stop in stops)


def main() -> None:
    channel = ChildChannel()
    trainer: Trainer | None = None

    def handle(command: Command) -> msgspec.Struct:
        nonlocal trainer
        if isinstance(command, Prepare):
            # Nobody's until all of it has succeeded: a node that goes on with half of it would train on other weights.
            made = Trainer(command, channel)
            prepared = made.prepared()
            trainer = made
            return prepared
        assert trainer is not None
        if isinstance(command, Train | Save) and command.step != trainer.steps_taken:
            raise ValueError(f"step {command.step} does not follow the {trainer.steps_taken} steps taken")
        match command:
            case Train():
                return trainer.step(command)
            case Stage():
                return trainer.stage()
            case Save():
                return trainer.save(command)
            case Flush():
                return trainer.flush()

    channel.serve(Command, handle)


if __name__ == "__main__":
    main()
