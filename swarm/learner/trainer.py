"""The trainer's process: `python -m swarm.learner.trainer`, started by the learner node. Reads top to bottom."""

from __future__ import annotations

import math
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch

from swarm.broadcast.manifest import TensorSpec
from swarm.child import ChildChannel
from swarm.learner.batch import Batch, collate, has_variance, reward_figures
from swarm.learner.checkpoint import (
    layout_of,
    load_model,
    save_small_files,
    stream_tensors,
    write_staging,
)
from swarm.learner.device import SMALL_MODEL_PARAMETERS, pick_device
from swarm.learner.messages import Command, Done, Flush, Prepare, Prepared, Save, Saved, Stage, Train, Trained
from swarm.learner.objective import clipped_loss
from swarm.learner.saving import Parts, Saver, restore, take, write

ADAM_BETAS = (0.9, 0.95)
GRADIENT_CLIP = 1.0

ROWS_PER_MICRO_BATCH = 64
"""Rows of one forward pass on a large model; gradients are accumulated over them."""

MAX_LOG_RATIO = 20.0
"""Bound of one token's part in mismatch_kl."""

SUMS = ("loss", "entropy", "clip_low", "clip_high", "ratio", "grad_norm", "skipped", "kl", "kl_tokens")
"""What is summed over the micro-batches of a step."""


class Trainer:
    """Model, optimiser and tokenizer of one run."""

    def __init__(self, command: Prepare, channel: ChildChannel) -> None:
        self._channel = channel
        self._command = command
        self._device = pick_device(command.device)
        with channel.alive():
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
        )

    def step(self, command: Train) -> Trained:
        """One learner step: a few optimiser steps over the batch, or none if no group has any variance."""
        began = time.monotonic()
        figures = reward_figures(command.groups)
        groups = [group for group in command.groups if has_variance(group)]
        sums = dict.fromkeys(SUMS, 0.0)
        self._set_learning_rate(command.step)
        steps, tokens = 0, 1.0
        if groups:
            batch = collate(groups, self._device)
            tokens = max(1.0, batch.mask.sum().item())
            order = torch.randperm(len(batch.advantages), generator=self._shuffle)
            for places in order.chunk(self._command.minibatches):
                self._optimizer_step(batch.rows(places.to(self._device)), sums, count_kl=steps == 0)
                steps += 1
        figures |= {
            "loss": sums["loss"] / max(1, steps),
            "grad_norm": sums["grad_norm"] / max(1, steps),
            "entropy": sums["entropy"] / tokens,
            "clip_ratio/low_mean": sums["clip_low"] / tokens,
            "clip_ratio/high_mean": sums["clip_high"] / tokens,
            "sampling/importance_sampling_ratio/mean": sums["ratio"] / tokens,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "optimizer_steps": steps - sums["skipped"],
            "optimizer_steps_skipped": sums["skipped"],
        }
        if sums["kl_tokens"]:
            figures["mismatch_kl"] = sums["kl"] / sums["kl_tokens"]
        self._lineage = command.lineage
        self.steps_taken = command.step + 1
        self._rehearse(began, command.step)
        saved = self._saver.report()
        return Trained(metrics=figures, seconds=time.monotonic() - began, saved_step=saved.step, save_fault=saved.fault)

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
            snapshot = take(self._parts, step=command.step, lineage=self._lineage)
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
        return state.step, bytes.fromhex(state.lineage)

    def _set_learning_rate(self, step: int) -> None:
        warm = min(1.0, (step + 1) / max(1, self._command.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = self._command.learning_rate * warm

    def _optimizer_step(self, batch: Batch, sums: dict[str, float], *, count_kl: bool) -> None:
        tokens = batch.mask.sum().clamp(min=1.0)
        small = self._parameters < SMALL_MODEL_PARAMETERS
        rows = len(batch.advantages) if small else ROWS_PER_MICRO_BATCH
        for places in torch.arange(len(batch.advantages), device=self._device).split(rows):
            self._accumulate(batch.rows(places), tokens, sums, count_kl=count_kl)
            self._channel.progress()
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRADIENT_CLIP))
        # One step on a gradient that is not finite would make every weight NaN, and publish that.
        if math.isfinite(norm):
            self._optimizer.step()
            sums["grad_norm"] += norm
        else:
            sums["skipped"] += 1
        self._optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, part: Batch, tokens: torch.Tensor, sums: dict[str, float], *, count_kl: bool) -> None:
        """Forward and backward of one micro-batch. The policy is the model at the rollouts' temperature."""
        logits = self._model(input_ids=part.token_ids, attention_mask=part.attention, use_cache=False).logits
        log_softmax = (logits[:, :-1].float() / self._command.temperature).log_softmax(-1)
        logprobs = log_softmax.gather(2, part.token_ids[:, 1:, None]).squeeze(2)
        result = clipped_loss(logprobs, part.behaviour, part.advantages, part.mask, tokens)
        result.loss.backward()
        with torch.no_grad():
            sums["loss"] += float(result.loss)
            sums["entropy"] += float((-(log_softmax.exp() * log_softmax).sum(-1) * part.mask).sum())
            sums["clip_low"] += float(result.clipped_low)
            sums["clip_high"] += float(result.clipped_high)
            sums["ratio"] += float(result.ratio_sum)
            if count_kl:
                _count_mismatch(logprobs, part, sums)


def _count_mismatch(logprobs: torch.Tensor, part: Batch, sums: dict[str, float]) -> None:
    """Distance between the engine's and the learner's log-probs where both are of the same version.

    Bounded, since one claim must not drown the others. The estimator r - 1 - log r of KL(behaviour, learner) is never
    negative (Schulman's k3). Only the first minibatch counts: after it the learner's weights are no longer those of any
    published version.
    """
    same = part.mask * (part.staleness == 0).unsqueeze(1)
    log_ratio = (logprobs - part.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sums["kl"] += float(((log_ratio.exp() - 1 - log_ratio) * same).sum())
    sums["kl_tokens"] += float(same.sum())


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
