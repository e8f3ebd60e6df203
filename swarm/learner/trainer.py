"""The trainer's process: `python -m swarm.learner.trainer`, started by the learner node, or by torchrun as one of
several ranks. Read it from top to bottom."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from swarm.broadcast.version.manifest import TensorSpec
from swarm.errors import UserError
from swarm.extras import require
from swarm.learner.adapter import ALPHA, WithoutAdapter, attach, hold_in, parameters_of, shape_of_adapter
from swarm.learner.alarms import mismatches_of
from swarm.learner.checkpoint.model_files import (
    digest_of_weights,
    layout_of,
    load_model,
    save_small_files,
    stream_tensors,
    write_staging,
)
from swarm.learner.checkpoint.saving import Saver, restore, take, write
from swarm.learner.memory import check_weights, described, fit, read_free_bytes, read_shape
from swarm.learner.messages import (
    MODEL,
    STAGING,
    Audit,
    Audited,
    Command,
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
)
from swarm.learner.optimizer import adamw
from swarm.learner.policy import Policy, arrange, is_half
from swarm.learner.ranks import Ranks
from swarm.learner.replay import audit
from swarm.learner.update import Learning, Update
from swarm.machine import free_host_bytes
from swarm.models.device import SMALL_MODEL_PARAMETERS, is_cpu_fast_in_half, stated
from swarm.process import ChildChannel, NoParent
from swarm.settings import EMBEDDED
from swarm.types import MAX_TOKENS
from swarm.wire import Digest

EXPERTS = (
    "this model is a mixture of experts: engines send about one token in ten to other experts than the learner does, "
    "and runs have collapsed of that. Watch mismatch_kl: its alarm leaves out steps, and ten in a row end the run"
)
ASSUMED_PROMPT_TOKENS = 2048  # For the memory preflight, if max_prompt_tokens is not set
# Rank 0 waits before it reports a fault to the node: if the end of another rank caused it, torchrun ends rank 0 in this
# time and reports which rank ended.
LAST_WORDS_S = 1.0
ALIKE_S = 3.0  # Another rank with a fault waits this long: rank 0 may have the same fault, and report it to the node


class Trainer:
    """Model, optimiser and tokenizer of one run; with several ranks, this rank's part of them."""

    def __init__(
        self, config: TrainerConfig, channel: ChildChannel, ranks: Ranks | None = None, *, resume: str = ""
    ) -> None:
        """`resume` is the checkpoint directory to go on from, or ""."""
        self._channel = channel
        self._config = config
        self._run_dir = config.run_dir or Path()
        self._ranks = ranks or Ranks()
        self._device = self._ranks.device(config.device)
        self._base: Digest | None = None
        """Digest of the frozen weights of an adapter run; None if all weights are trained."""
        self._with_base: set[tuple[int, int]] = set()
        """The files, by device and inode, to which this process has written the frozen weights: the staging file and
        the learner's map, which change places. Both exist as long as the run, so no other file can get their inodes."""
        with channel.alive():
            self._config = self._checked()
            self._policy, self._tokenizer = self._load()
        self._model = self._policy.module.model
        self._parameters = parameters_of(self._model)
        self._trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        if self._parameters < SMALL_MODEL_PARAMETERS:
            torch.set_num_threads(1)
        self._model.train()
        torch.manual_seed(config.seed)
        self._tensors: dict[TensorSpec, torch.Tensor] = stream_tensors(self._model)
        self._config, self._notes = self._settle(self._policy)
        arrange(self._model, self._config)
        self._learning = self._make_learning()
        self._update = Update(self._config, self._learning)
        self._saver = Saver()
        self._learning.optimizer.register_step_pre_hook(lambda *_: self._wait_for_checkpoint(only_shared=True))
        self._resumed_step, self._lineage = self._resume(resume) if resume else (0, b"")
        self.steps_taken = self._resumed_step

    def prepared(self) -> Prepared:
        """Save the small files, stage the weights and describe the model."""
        is_first = self._ranks.rank == 0
        files = self._ranks.together(
            lambda: save_small_files(self._model, self._tokenizer, self._run_dir / MODEL) if is_first else ()
        )
        self.stage()
        return Prepared(
            layout=layout_of(self._tensors, files, shape_of_adapter(self._model, self._base) if self._base else None),
            parameters=self._parameters,
            trained=self._trained,
            vocab_size=self._model.config.get_text_config().vocab_size,
            context_tokens=context_tokens_of(self._model),
            stop_token_ids=stop_token_ids_of(self._model, self._tokenizer),
            device=str(self._device),
            step=self._resumed_step,
            lineage=self._lineage,
            weights=self._began_with,
            notes=(*self._notes, *([EXPERTS] if self._trains_routers() else ())),
            left_bytes=self._left_bytes,
            whole_bytes=torch.cuda.mem_get_info(self._device)[1] if self._device.type == "cuda" else 0,
        )

    def step(self, command: Train) -> Trained:
        """Take a learner step: a few optimiser steps over the batch, or none if no group has any variance."""
        began = time.monotonic()
        self._update.learning_rate = command.learning_rate or self._config.resolved_learning_rate
        try:
            figures, alarms = self._update.step(command.groups, command.step)
        except torch.OutOfMemoryError as error:
            raise UserError(_out_of_memory(command, error)) from error
        self._lineage = command.lineage
        self.steps_taken = command.step + 1
        return Trained(
            metrics=figures,
            seconds=time.monotonic() - began,
            saved=self._saver.report(),
            alarms=alarms,
            withheld=dict(self._update.withheld),
            mismatches=mismatches_of(self._update.compared),
        )

    def _checked(self) -> TrainerConfig:
        """The configuration, after checking that the weights fit. `auto` becomes bf16 on a CPU that is fast in it."""
        config, free = self._config, self._free()
        is_embedded = config.model in EMBEDDED
        shape = None if is_embedded else read_shape(config.model, config.adapter, config.base_precision)
        if config.precision == "auto" and shape is not None and is_cpu_fast_in_half(self._device, shape.parameters):
            config = config.model_copy(update={"precision": "bfloat16"})

        def check() -> None:
            # Here, before gigabytes are loaded in vain.
            if config.optimizer_states == "8bit":
                require("quantized", 'optimizer_states = "8bit"')
            if config.base_precision == "nf4":
                require("quantized", "--base-precision nf4")
            if shape is not None and shape.parameters >= SMALL_MODEL_PARAMETERS:
                check_weights(shape, config, self._device, free, self._ranks.count)

        self._ranks.together(check if self._ranks.rank == 0 else lambda: None)
        return config

    def _free(self) -> tuple[int, int]:
        """Free bytes of the device and of the host, the least of all ranks."""
        own = read_free_bytes(self._device, ranks=self._ranks.count)
        return -self._ranks.most(-own), -self._ranks.most(-free_host_bytes())

    def _make_learning(self) -> Learning:
        config, channel = self._config, self._channel
        reference: Policy | WithoutAdapter | None = None
        if config.kl_weight and config.adapter is not None:
            reference = WithoutAdapter(self._policy)
        elif config.kl_weight:
            # The model that the run began with, also if it goes on from a checkpoint.
            with channel.alive():
                reference, _ = self._load()
            reference.module.requires_grad_(False)
            reference.settle(config, self._device)
        return Learning(
            model=self._model,
            optimizer=adamw(self._model, config.resolved_learning_rate, config.weight_decay, config.optimizer_states),
            shuffle=torch.Generator().manual_seed(config.seed),
            policy=self._policy,
            reference=reference,
            ranks=self._ranks,
            device=self._device,
            progress=channel.progress,
            base=self._base or b"",
            rounded=self._rounded if is_half(config.precision, self._device.type) else nullcontext,
        )

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """Within the block, passes use the published weights. A plain cast to bf16 would round to the nearest number,
        and so lose changes that were published."""
        self._wait_for_checkpoint(only_shared=True)
        with self._ranks.rounded(self._model):
            yield

    def _load(self) -> tuple[Policy, Any]:
        config, made_in = self._config, self._run_dir / MODEL
        half = is_half(config.precision, self._device.type)
        if config.adapter is not None:
            model, tokenizer = self._load_adapted(config.adapter, half=half)
            source = None
        else:
            model, tokenizer, source = self._ranks.read(config.model, config.seed, made_in, self._channel.tell)
            self._began_with = digest_of_weights(source or model).hex() if self._ranks.rank == 0 else ""
        policy = Policy(model, config, temperature=config.temperature)
        self._ranks.place(policy.module, source, self._device, half=half)
        if config.adapter is not None:
            policy.module.weights_in_half |= half
            # On this device, since unpacked weights are published as this device computes them.
            self._base = digest_of_weights(model)
            self._began_with = self._base.hex()
        return policy, tokenizer

    def _load_adapted(self, rank: int, *, half: bool) -> tuple[Any, Any]:
        """Load the model and add an adapter, which only a single rank can train. Frozen weights are bf16 if passes are,
        else the same numbers in float32."""
        config, made_in = self._config, self._run_dir / MODEL
        model, tokenizer = load_model(config.model, config.seed, made_in, self._channel.tell, torch.bfloat16)
        hold_in(model, config.base_precision)
        attach(model, rank, ALPHA * rank, name=config.model, seed=config.seed)
        return model if half else model.float(), tokenizer

    def _settle(self, policy: Policy) -> tuple[TrainerConfig, tuple[str, ...]]:
        """Choose how steps are computed; the configuration, and lines for people. A small model computes a whole
        minibatch at once, and always fits."""
        config, notes = policy.settle(self._config, self._device)
        self._left_bytes = self._free()[0]
        if self._parameters < SMALL_MODEL_PARAMETERS:
            return config, notes
        fitted, self._left_bytes = fit(
            policy,
            config,
            self._device,
            self._left_bytes,
            ranks=self._ranks.count,
            longest=min(self._longest_row(), context_tokens_of(self._model)),
            kl=bool(config.kl_weight) and config.adapter is None,
        )
        return fitted, (*notes, described(fitted, self._device))

    def _trains_routers(self) -> bool:
        experts = stated(self._model.config.get_text_config(), "num_experts_per_tok")
        return self._config.adapter is None and bool(experts)

    def _longest_row(self) -> int:
        return self._config.longest_completion + (self._config.max_prompt_tokens or ASSUMED_PROMPT_TOKENS)

    def audit(self, command: Audit) -> Audited:
        began, config = time.monotonic(), self._config
        half = command.fast and is_half(config.precision, self._device.type)
        try:
            with self._channel.alive(), self._ranks.with_weights(self._tensors, Path(command.path)) as weights:
                found = audit(
                    self._policy, command.rollouts, config, self._device, weights, ranks=self._ranks, half=half
                )
        except (torch.OutOfMemoryError, FileNotFoundError) as fault:  # Kept weights go first when the disk is full
            if self._ranks.count > 1 and isinstance(fault, torch.OutOfMemoryError):
                raise  # The other ranks wait for this one.
            found = Audited()
        return msgspec.structs.replace(found, seconds=time.monotonic() - began)

    def stage(self) -> Done:
        staging = self._run_dir / STAGING
        if self._base is not None and staging.exists() and _inode(staging) in self._with_base:
            write_staging(self._tensors, staging, only_trained=True)
        else:
            self._ranks.stage(self._tensors, staging)
            self._with_base.add(_inode(staging))
        return Done()

    def save(self, command: Save) -> Done:
        """Begin to write a checkpoint; training goes on meanwhile."""
        self._wait_for_checkpoint()
        alarms, claims = self._update.alarms.state, self._update.claims.state
        snapshot = take(self._learning, step=command.step, lineage=self._lineage, alarms=alarms, claims=claims)
        if self._ranks.rank == 0:
            directory = Path(command.directory)
            self._saver.start(snapshot, lambda: write(snapshot, self._model, self._tokenizer, directory))
        return Done()

    def _wait_for_checkpoint(self, *, only_shared: bool = False) -> None:
        with self._channel.alive():
            self._saver.wait(only_shared=only_shared)

    def flush(self) -> Saved:
        self._wait_for_checkpoint()
        return self._saver.report()

    def _resume(self, directory: str) -> tuple[int, bytes]:
        state = restore(self._learning, Path(directory))
        self._update.alarms.state, self._update.claims.state = state.alarms, state.claims
        return state.step, bytes.fromhex(state.lineage)


def _inode(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_dev, state.st_ino


def _out_of_memory(command: Train, error: torch.OutOfMemoryError) -> str:
    """A line for the user, since after a restart from the checkpoint the same batch would need as much memory."""
    longest = max(len(group.prompt_token_ids) + r.length for group in command.groups for r in group.rollouts)
    reason = str(error).strip().splitlines()[0]
    return (
        f"the device's memory ran out in learner step {command.step}, whose longest row has {longest:,} tokens "
        f"({reason}); go on with --resume and fewer --tokens-per-micro-batch, or see whether another process is on it"
    )


def context_tokens_of(model: Any) -> int:
    found = stated(model.config.get_text_config(), "max_position_embeddings", "max_seq_len") or 0
    return int(found) if found > 0 else MAX_TOKENS  # ALiBi and Mamba state no limit; XLNet states -1


def stop_token_ids_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-turn tokens that any of a model's files names, if they are in its vocabulary."""
    files = (model.generation_config, model.config, model.config.get_text_config(), tokenizer)
    stated = [getattr(file, "eos_token_id", None) for file in files]
    found = [
        token for own in stated for token in (own if isinstance(own, list | tuple) else [own]) if token is not None
    ]
    return tuple(dict.fromkeys(token for token in map(int, found) if 0 <= token < files[2].vocab_size))


class Commands:
    """Carries out commands one after another, in the same way on every rank."""

    def __init__(self, channel: ChildChannel, ranks: Ranks) -> None:
        self._channel = channel
        self._ranks = ranks
        self._trainer: Trainer | None = None

    def handle(self, command: Command) -> msgspec.Struct:
        if isinstance(command, Prepare):
            # Keep the trainer only once it is fully prepared: with half of it a node would train on other weights.
            config = TrainerConfig.model_validate(command.config)
            made = Trainer(config, self._channel, self._ranks, resume=command.resume)
            prepared = made.prepared()
            self._trainer = made
            return prepared
        trainer = self._trainer
        assert trainer is not None
        if isinstance(command, Train | Save) and command.step != trainer.steps_taken:
            raise ValueError(f"step {command.step} does not follow the {trainer.steps_taken} steps taken")
        match command:
            case Train():
                return trainer.step(command)
            case Audit():
                return trainer.audit(command)
            case Stage():
                return trainer.stage()
            case Save():
                return trainer.save(command)
            case Flush():
                return trainer.flush()


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _run_rank()
    channel = ChildChannel()
    channel.serve(Command, Commands(channel, Ranks()).handle)


def _run_rank() -> NoReturn:
    """Run one of several ranks until the node ends: rank 0 gets the node's commands and passes them to the others."""
    from swarm.learner.sharded import Sharded, SharedFault

    channel = ChildChannel(status_without_parent=1) if os.environ["RANK"] == "0" else NoParent()
    ranks = Sharded()
    commands = Commands(channel, ranks)

    def lead(command: Command) -> msgspec.Struct:
        try:
            ranks.send_command(msgspec.msgpack.encode(command))
            return commands.handle(command)
        except SharedFault:
            raise
        except Exception:
            time.sleep(LAST_WORDS_S)
            raise

    if ranks.rank == 0:
        channel.serve(Command, lead, goes_on_after=SharedFault)
        os._exit(1)
    while (command := ranks.receive_command()) is not None:
        try:
            commands.handle(msgspec.msgpack.decode(command, type=Command))
        except SharedFault:
            pass
        except Exception:  # noqa: BLE001 - after any fault this rank must end, since others may wait for it
            traceback.print_exc()
            sys.stderr.flush()
            time.sleep(ALIKE_S)
            os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
