"""The trainer child, kept alive: when it dies or hangs, a new one continues from the newest whole checkpoint.

The order matters: the journal is on disk before a checkpoint is begun, so that a checkpoint never holds a batch that
the journal does not know. Batches since the checkpoint are trained on again, from the journal and in the same order, so
weights, optimiser and generators come out as before. On a GPU they may differ in the last bit. So the result is
compared with the published weights, and `on_divergence` is called if it differs.

The child writes the staging file and publications read it; `staging_lock` keeps the two apart. The file is reused: it
held the weights published before last. If those are kept under another name (`audited`), a new file takes its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar

from swarm.aio import in_thread
from swarm.broadcast.publishing import content_of_file
from swarm.broadcast.store.disk import DiskFull, allocate
from swarm.broadcast.version.manifest import Layout
from swarm.errors import ChildFailed, UserError
from swarm.learner.checkpoint.files import (
    Checkpoint,
    checkpoint_path,
    clear_up,
    link_best,
    newer_than,
    newest_whole,
    prune,
    whole_checkpoints,
)
from swarm.learner.messages import Audited, AuditRollout, Prepared, Saved, Trained, TrainGroup, TrainRollout
from swarm.learner.process import TrainerProcess, torchrun_options
from swarm.rollout.journal.entries import RecordedGroup
from swarm.rollout.plane.rules import staleness
from swarm.run.run import Run
from swarm.run.timeline import LEARNER
from swarm.types import MAX_PARTS, NodeId, Prompt, Rollout, Score
from swarm.wire import Digest

KEPT_CHECKPOINTS = 3  # The newest stay on disk
MAX_FAULTS = 3  # Trainers in a row that end without a learner step: then the machine or the model is to blame

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """The last publication: its step, and the digest of its weights."""

    step: int
    content: Digest


class Training:
    """The trainer as the learner's loop sees it: batches in, staged weights out. `step` counts learner steps."""

    def __init__(
        self,
        run: Run,
        prompt: Callable[[int], Prompt],
        longest_completion: int,
        *,
        on_divergence: Callable[[], None],
    ) -> None:
        self._run = run
        self._prompt = prompt
        self._longest_completion = longest_completion
        self._on_divergence = on_divergence
        self._trainer = TrainerProcess(run.directory, torchrun=torchrun_options(run.config), say=run.say)
        self._root = run.directory / "checkpoints"
        self._faults = self._furthest = 0
        self._found: Checkpoint | None = None
        self.saved_step: int | None = None
        self.layout: Layout | None = None
        """The layout of the staged weights; None before `open`."""
        self.step = 0
        self.staged_step = 0
        """How many learner steps the staged weights have had."""
        self.stage_s = 0.0
        """For how long the trainer was held up by writing them."""
        self.published: PublishedStep | None = None
        self.staging_lock = asyncio.Lock()
        """Held while the staging file is read or written."""
        self._calling = asyncio.Lock()
        """Held for a whole call, with the restarts of the trainer that it takes: so one death is seen by one caller.
        The trainer takes one call at a time, and audits come at any time. Taken before `staging_lock`."""
        self.files_dir = self._trainer.files_dir
        self.staging = self._trainer.staging
        self.audited = run.directory / "audited"
        """Where versions whose rollouts may be audited have second names (audit/auditing.py)."""
        self.save_fault = ""
        """Why the last checkpoint could not be written; "" if it was."""
        self.best: int | None = None
        """The best measured version: RUN_DIR/best leads to the checkpoint nearest to it, which is kept."""
        self._linked: int | None = None

    async def look(self) -> None:
        """Find the checkpoint that the run continues from, before others are told about the run. Raise UserError if the
        newest whole checkpoint holds other batches than the journal, Damaged if the batches after it cannot be trained
        on again."""
        self._found = found = await asyncio.to_thread(self._newest)
        await asyncio.to_thread(self._run.journal.check_batches, found.step if found is not None else 0)

    async def open(self) -> Prepared:
        """Start the child at the checkpoint that `look` found, or at step 0."""
        found = self._found
        await asyncio.to_thread(self._own_staging)
        prepared = await self._trainer.prepare(
            self._run.config, self._longest_completion, found.path if found else None
        )
        self.step = self.staged_step = prepared.step
        self._furthest = max(self._furthest, self.step)
        self.saved_step = found.step if found is not None else None
        self.layout = prepared.layout
        return prepared

    async def catch_up(self, step: int) -> None:
        """Train on the recorded batches before `step`, with a new child if one dies."""
        with self._busy("train"):
            await self._steadily(self._nothing, step)

    async def train(self, groups: list[TrainGroup]) -> Trained:
        """Take the next learner step. Its batch must be recorded already."""
        with self._busy("train"):
            trained = await self._steadily(lambda: self._train(groups))
        await self._note_save(trained.saved)
        return trained

    async def audit(self, path: Path, rollouts: tuple[AuditRollout, ...], fast: bool) -> Audited:
        """Have rollouts drawn again with the weights at `path`, as messages.Audit says. What ends a trainer is not
        tried again: it may not fit."""
        tries = 0

        async def attempt() -> Audited:
            nonlocal tries
            tries += 1
            return await self._trainer.audit(path, rollouts, fast) if tries == 1 else Audited()

        return await self._steadily(attempt)

    async def stage(self) -> None:
        """Have the weights of this step written to `staging`."""
        with self._busy("stage"):
            await self._steadily(self._stage)

    async def save(self) -> None:
        """Begin a checkpoint of this step. It is written while training goes on."""
        await self._steadily(self._save)

    async def flush(self) -> None:
        """Wait until the checkpoint under way is written."""
        await self._note_save(await self._steadily(self._trainer.flush))

    async def stop(self) -> None:
        await self._trainer.stop()

    # -- parts -----------------------------------------------------------------------------------------------

    @contextmanager
    def _busy(self, state: str) -> Iterator[None]:
        self._run.timeline.note(LEARNER, state, time.time())
        try:
            yield
        finally:
            self._run.timeline.note(LEARNER, "wait", time.time())

    def _newest(self) -> Checkpoint | None:
        # Usually the next checkpoint clears up, but not if the learner was killed at its last one.
        clear_up(self._root)
        found = newest_whole(self._root)
        if newer := newer_than(self._root, found.step if found is not None else None):
            self._run.say(
                f"damaged and passed over: {', '.join(newer)} (`echo-node verify` says what is wrong with them)"
            )
        if found is not None:
            self._check_lineage(found)
        return found

    def _check_lineage(self, checkpoint: Checkpoint) -> None:
        try:
            same = self._run.journal.lineage(checkpoint.step) == checkpoint.lineage
        except LookupError:
            same = False
        if not same:
            raise UserError(
                f"{checkpoint.path} was trained on other batches than the run's journal holds: restore both from "
                "one copy, or remove that checkpoint to train again from an older one"
            )

    async def _steadily(self, attempt: Callable[[], Awaitable[R]], step: int = 0) -> R:
        """Make `attempt` with a trainer at `step`, or at the furthest step of this run, again with a new one each time
        one dies. Raise ChildFailed after MAX_FAULTS deaths without a new furthest step."""
        async with self._calling:
            while True:
                try:
                    await self._replay(max(step, self._furthest))
                    return await attempt()
                except ChildFailed as fault:
                    self._faults += 1
                    if self._faults >= MAX_FAULTS:
                        raise
                    self._run.say(
                        f"{fault}; starting it again from the last checkpoint ({self._faults} of {MAX_FAULTS})"
                    )
                    self._run.log.event("trainer_restarted", reason=str(fault), step=self.step)
                    await self._reopen()

    async def _reopen(self) -> None:
        await self._trainer.stop()
        self._found = await asyncio.to_thread(self._newest)
        try:
            async with self.staging_lock:
                await self.open()
        except ChildFailed as fault:
            # A child whose preparation failed may still run, with weights that do not match `step`. Stop it. The next
            # attempt finds no child, which counts as the next fault.
            self._run.say(str(fault))
            await self._trainer.stop()

    async def _replay(self, step: int) -> None:
        """Train on the recorded batches from the child's step to `step`, with a checkpoint as often as ever: a trainer
        that dies again comes further. Do nothing if the child is there already."""
        if self.step < step:
            self._run.say(f"training again on the recorded batches {self.step} to {step - 1}")
        while self.step < step:
            recorded = await asyncio.to_thread(self._run.journal.batch, self.step)
            # In a thread too, because the prompts are made again.
            trained = await self._train(await in_thread(partial(self._groups_of, recorded)))
            scores = [one.score for group in recorded for one in group.rollouts if one.score]
            self._run.log.metrics(step_figures(self.step, scores, trained))
            await self._note_save(trained.saved)
            if self.published is not None and self.published.step == self.step:
                await self._compare(self.published.content)
            if self.step < step and self.step % self._run.config.checkpoint_every_steps == 0:
                await self._save()

    async def _nothing(self) -> None: ...

    async def _train(self, groups: list[TrainGroup]) -> Trained:
        """Have the child take its next step as the journal has it: what it says is the same in every life."""
        lineage, learning_rate = await asyncio.to_thread(self._run.journal.trained_as, self.step)
        trained = await self._trainer.train(self.step, groups, lineage, learning_rate)
        self.step += 1
        if self.step > self._furthest:
            self._faults, self._furthest = 0, self.step
        return trained

    async def _save(self) -> None:
        # First what it rests on: a checkpoint is of batches that outlive a power cut.
        await self._run.journal.sync()
        await self._trainer.save(checkpoint_path(self._root, self.step), self.step)

    async def _stage(self) -> None:
        async with self.staging_lock:
            await asyncio.to_thread(self._own_staging)
            began = time.monotonic()
            await self._trainer.stage()
            self.stage_s = time.monotonic() - began
            self.staged_step = self.step

    def _own_staging(self) -> None:
        """Make sure that the staging file has no second name, by replacing it if necessary. If the disk has no room for
        another file, give up the weights that may be audited."""
        if not self.staging.exists() or (state := self.staging.stat()).st_nlink == 1:
            return
        fresh = self.staging.with_name("staging.next")
        try:
            with fresh.open("wb") as file:
                allocate(file.fileno(), state.st_size, fresh)
        except DiskFull:
            fresh.unlink()
            for second in self.audited.glob("*.bin"):
                second.unlink(missing_ok=True)
        else:
            fresh.replace(self.staging)

    async def _compare(self, content: Digest) -> None:
        """Stage the weights, and report it if they differ from the published ones."""
        assert self.layout is not None
        await self._stage()
        if await asyncio.to_thread(content_of_file, self.staging, self.layout) != content:
            self._run.log.event("diverged", step=self.step)
            self._on_divergence()

    def _groups_of(self, recorded: Sequence[RecordedGroup]) -> list[TrainGroup]:
        groups: list[TrainGroup] = []
        for group in recorded:
            rollouts = sorted(group.rollouts, key=lambda one: one.rollout.index)
            answers = [(one.rollout, one.score, one.node) for one in rollouts]
            groups.append(train_group(self._prompt(group.prompt_number), answers, self.step))
        return groups

    async def _note_save(self, saved: Saved) -> None:
        """Report why a checkpoint was not written. After a new one, prune old checkpoints and payloads, but never the
        one that is nearest to the best version."""
        if saved.fault:
            self.save_fault = saved.fault
            self._run.say(f"no checkpoint was written: {saved.fault}")
            self._run.log.event("checkpoint_failed", reason=saved.fault)
        is_new = saved.step is not None and saved.step != self.saved_step
        if self.best is not None and (is_new or self.best != self._linked):
            self._linked = self.best
            await asyncio.to_thread(link_best, self._root, self.best)
        if not is_new:
            return
        self.saved_step, self.save_fault = saved.step, ""
        self._run.log.event("checkpoint", step=saved.step)
        await asyncio.to_thread(prune, self._root, KEPT_CHECKPOINTS)
        kept = await asyncio.to_thread(whole_checkpoints, self._root)
        # The best checkpoint may be far older than the others, and needs no rollouts to go on from.
        oldest = min(sorted(one.step for one in kept)[-KEPT_CHECKPOINTS:], default=0)
        # Prune a batch at a time, so that the journal's thread is never busy for long.
        while await self._run.journal.prune(oldest_step=oldest, keep_rollouts=self._run.config.keep_rollouts):
            pass


def step_figures(step: int, scores: Sequence[Score], trained: Trained) -> dict[str, float]:
    """Return the figures of learner step `step`, counted from 1, for metrics.jsonl."""
    exact = sum(score.exact for score in scores) / len(scores)
    figures = {"step": step, "exact_match": exact, "train_step_s": round(trained.seconds, 4)}
    return {**figures, **reward_figures(scores), **trained.metrics}


def reward_figures(scores: Sequence[Score]) -> dict[str, float]:
    """Return mean and sample standard deviation of each named reward, under TRL's names."""
    figures: dict[str, float] = {}
    names = dict.fromkeys(name for score in scores for name in score.parts)
    for name in islice(names, MAX_PARTS):
        values = [score.parts[name] for score in scores if name in score.parts]
        figures[f"rewards/{name}/mean"] = fmean(values)
        figures[f"rewards/{name}/std"] = stdev(values) if len(values) > 1 else 0.0
    return figures


def train_group(
    prompt: Prompt, answers: Sequence[tuple[Rollout, Score | None, NodeId | None]], step: int
) -> TrainGroup:
    """Return a group in the form that the trainer reads, for batch `step`. Every rollout has a score and an author."""
    rollouts: list[TrainRollout] = []
    for rollout, score, author in answers:
        assert score is not None
        assert author is not None
        assert rollout.oldest is not None
        rollouts.append(
            TrainRollout(
                token_ids=rollout.token_ids,
                logprobs=rollout.logprobs,
                reward=score.reward,
                staleness=staleness(rollout.oldest, step),
                truncated=rollout.finish == "length",
                sampler=author,
                parts=rollout.turns_by(author),
                turns=rollout.turns,
                seats=rollout.seats,
            )
        )
    return TrainGroup(prompt_token_ids=prompt.token_ids, rollouts=tuple(rollouts))
