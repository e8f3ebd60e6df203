"""The learner's loop: wait for a batch, train on it, publish, measure, keep a checkpoint. Read it from top to bottom.

Publications, evaluations and the writing of checkpoints run while training goes on. `status` may be called at every
await, so values that belong together change together.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from swarm.aio import unless_stopped
from swarm.audit.auditing import REFUSED, Auditing, bar_file, write_refusal
from swarm.errors import UserError
from swarm.lead.dials import described
from swarm.lead.provisioning import Provisioning
from swarm.lead.publication import Publication
from swarm.lead.signal import AlarmLog, LearningSignal, rewards_failed
from swarm.lead.training import Training, step_figures, train_group
from swarm.learner.checkpoint.files import BEST
from swarm.learner.messages import Trained
from swarm.rollout.api import RolloutService
from swarm.rollout.journal.entries import BoundSet
from swarm.rollout.plane.effects import Evaluated
from swarm.rollout.plane.groups import Group
from swarm.rollout.plane.heldout import held_out_figures
from swarm.rollout.plane.rules import is_for_publication, publication_period, staleness
from swarm.run.directory import CONFIG, read_values, write_json
from swarm.run.run import Run
from swarm.types import NodeId, Prompt

STALL_S = 30.0  # After this long without a batch the learner says what it waits for
PAUSE = "paused"  # File in the run directory: a pause lasts as long as it exists, also across restarts
SAY_S = 10.0  # Between two lines about steps: each of slow ones has its line
SAVE_AGAIN_S = 10.0  # Pause between two tries to write a checkpoint on a full disk: each copies the whole model

CLASS = re.compile(r"[\w.-]{1,24}/[\w.-]{1,24}/[\w.-]{1,24}")  # Of an engine, as samplers name theirs
MAX_CLASSES = 16  # Told apart in a step; honest swarms have fewer
RECENT = 9  # Steps that `status` speaks of: four may stall without moving their median


class Steps:
    """The run's learner steps, and what its owner changes about them while it runs (lead/dials.py)."""

    def __init__(
        self,
        run: Run,
        bound: BoundSet,
        training: Training,
        publication: Publication,
        rollouts: RolloutService,
        provisioning: Provisioning,
        held_out_prompts: Sequence[Prompt],
        auditing: Auditing | None = None,
    ) -> None:
        self._run = run
        self._config = run.config
        self._training = training
        self._publication = publication
        self._rollouts = rollouts
        self._provisioning = provisioning
        self._recorded_at = self._waiting_since = self._waited_s = 0.0
        self._said_at = -math.inf
        self._held_out_prompts = held_out_prompts
        self._signal = LearningSignal()
        self._auditing = auditing
        self._save_failed_at = 0.0
        self._alarms = AlarmLog(emit=run.log.event, say=run.say)
        self._unsaid: dict[str, float] = {}
        self._stop = asyncio.Event()
        self._save_wanted = asyncio.Event()
        self._save_soon = False
        self._every_steps = run.config.publish_every_steps  # As asked for; a low bound shortens it
        self.is_paused = False
        self._in_step = False
        self._recent: deque[tuple[float, Counter[int]]] = deque(maxlen=RECENT)
        self.bound = bound
        self.held_out: list[dict[str, float]] = run.log.held_out
        self.max_staleness_seen = run.log.max_staleness_seen
        self.step = training.step
        self._keep_near_best()

    @property
    def _target_reached(self) -> bool:
        """Whether the last measured version reached the target, even if an earlier one was better."""
        target = self._config.target
        return target is not None and bool(self.held_out) and self.held_out[-1]["exact_match"] >= target

    def request_stop(self) -> str:
        """Take no further step. `run` and `finish` return once the current step is over. Return what they and
        `leave_off` wait for, "" if nothing."""
        self._stop.set()
        if self._in_step:
            return f"the end of step {self.step + 1} and its checkpoint"
        return f"the checkpoint of step {self.step}" if (self._training.saved_step or 0) < self.step else ""

    async def run(self) -> None:
        """Take the remaining steps, until the target is reached, or the budget, an alarm or the user ends the run."""
        evaluation = asyncio.create_task(self._evaluate())
        publishing = asyncio.create_task(asyncio.sleep(0))
        self._recorded_at = time.monotonic()
        try:
            while self.step < self._config.steps:
                if self._target_reached and await self._last_reaches_it(publishing, evaluation):
                    return
                if (batch := await self._next_batch(publishing)) is None:
                    return
                self._in_step = True
                step = self.step
                prompts = [
                    train_group(g.prompt, [(s.rollout, s.score, s.author) for s in g.samples if s.rollout], step)
                    for g in batch
                ]
                trained = await self._training.train(prompts)
                self._in_step = False
                figures = self._record(batch, step, trained)
                self._look(batch, figures)
                await unless_stopped(self._stop, publishing)
                self._alarms.doubted(trained.withheld, step=self.step)
                if self._alarms.told(trained.alarms, step=self.step) or self._stop.is_set():
                    return
                if self._is_for_publication():
                    await self._training.stage()
                    publishing = asyncio.create_task(self._publish_staged())
                await self._save_if_due()
                if evaluation.done():
                    evaluation.result()
                    if self.step % self._config.eval_every_steps == 0 and self.step < self._config.steps:
                        evaluation = asyncio.create_task(self._evaluate())
            await unless_stopped(self._stop, publishing)
            await self._patiently(evaluation)
        finally:
            evaluation.cancel()
            publishing.cancel()

    async def _publish_staged(self) -> None:
        await self._publication.publish_staged(self.step)
        if self._auditing is not None:
            await asyncio.to_thread(self._auditing.prune, self.step - self.bound.max_staleness)

    async def leave_off(self) -> None:
        """Write a checkpoint of this step, so that no batch has to be trained on again. Try only once: the run can
        also continue from the journal."""
        await self._training.flush()
        if self.step and self._training.saved_step != self.step:
            await self._training.save()
            await self._training.flush()

    async def finish(self) -> bool:
        """Tell the samplers that the run ends, measure the last version and keep it. Return False if a target was set
        and not reached, or if an alarm or the user ended the run."""
        await self._rollouts.end("draining")
        await self._measure_last()
        await self._keep()
        if self._stop.is_set():
            return False
        if (best := self._best) is not None:
            self._run.say(
                f"the last version is {self.step}, in checkpoints; the best measured is {best['version']} with "
                f"{best['exact_match']:.3f} exact, and {self._run.directory / BEST} is the checkpoint nearest to it"
            )
        if self._alarms.stopped_by:
            return False
        return self._config.target is None or (self._target_reached and self._is_measured)

    async def _last_reaches_it(self, publishing: asyncio.Task[None], evaluation: asyncio.Task[None]) -> bool:
        """Return whether the last version reaches the target, as an earlier one did. The user gets the last one."""
        await unless_stopped(self._stop, publishing)
        await self._patiently(evaluation)
        if self._target_reached:
            await self._measure_last()
        return self._target_reached

    @property
    def _is_measured(self) -> bool:
        return bool(self.held_out) and self.held_out[-1]["version"] == self.step

    async def _measure_last(self) -> None:
        if self._is_enough() or self._alarms.stopped_by:
            # The budget is spent, the user stopped the run, or the model is not worth measuring.
            return
        if self.step > self._publication.newest.version:
            await self._publication.publish(self.step)
        if not self._is_measured:
            await self._patiently(asyncio.create_task(self._evaluate()))

    async def _keep(self) -> None:
        """Write the last checkpoint. It is the result, so retry until it is written or the user stops the run."""
        await self._training.flush()
        while self._training.saved_step != self.step and not self._stop.is_set():
            if self._training.save_fault:
                await unless_stopped(self._stop, asyncio.sleep(SAVE_AGAIN_S))
            await self._training.save()
            await self._training.flush()

    def status(self) -> dict[str, Any]:
        """Return the part of the learner's status that is about steps."""
        ages = sum((ages for _, ages in self._recent), Counter[int]())
        return {
            "step": self.step,
            "max_staleness": self.bound.max_staleness,
            "publish_every_steps": self.bound.publish_every_steps,
            "max_staleness_seen": self.max_staleness_seen,
            "step_s": round(median(s for s, _ in self._recent), 4) if self._recent else None,
            "ages": [ages[age] for age in range(max(ages, default=-1) + 1)],
            "best": self._best,
            "alarm": self._alarms.last,
            "alarms": dict(self._alarms.counts),
            "stopped_by": self._alarms.stopped_by,
            "rollouts_withheld": self._alarms.withheld,
            "settings": described(self._changeable()),
            "barred": list(self._rollouts.barred)[-256:],  # The newest: everybody may ask
        }

    # -- what the run's owner changes ------------------------------------------------------------------------

    async def change(self, key: str, value: Any, *, by: str) -> str:
        """Change what lead/dials.py names, with an event `set`, and return a line for the user. UserError if it cannot
        be changed. What has to outlive this life is in the journal, in config.json, in PAUSE or in caught/."""
        held = self._changeable()
        match key:
            case "paused":
                (self._run.directory / PAUSE).touch() if value else (self._run.directory / PAUSE).unlink(
                    missing_ok=True
                )
                self.pause(value)
            case "max_cost":
                if self._provisioning.spent.is_set():
                    raise UserError("the run has cost its most and ends: resume it with a larger --max-cost")
                self._provisioning.max_cost = value
            case "refuse":
                if (why := self._rollouts.barred.get(value)) is not None:
                    raise UserError(f"node {value} is barred already: {why}")
                write_refusal(self._run.directory, value, step=self.step)
                self._rollouts.bar(value, REFUSED)
            case "let_in":
                was_known = self._auditing is not None and self._auditing.let_in(value)
                if not was_known and value not in self._rollouts.barred:
                    raise UserError(f"node {value} is not barred: `echo-node audit` names those that are")
                bar_file(self._run.directory, value).unlink(missing_ok=True)
                self._rollouts.unbar(value)
            case "checkpoint":
                value = self.step + self._in_step
                if value == (self._training.saved_step or 0):
                    raise UserError(f"step {value} has its checkpoint" if value else "no step was taken yet")
                self._save_wanted.set()
            case "max_staleness" | "publish_every_steps" | "learning_rate":
                await self._set_bound(key, value)
        # The learning rate there stays that of the first batches: later ones have theirs in the journal.
        now = self._changeable()
        changed = {key: value} | {name: now[name] for name in now if now[name] != held[name]}
        for name, after in changed.items():
            self._run.log.event("set", key=name, before=held.get(name), after=after, step=self.step, by=by)
        line = f"{key} is {value}{f' (was {held[key]})' if key in held else ''}".lower()
        kept = {name: now[name] for name in ("max_staleness", "max_cost")} | {"publish_every_steps": self._every_steps}
        try:
            write_json(self._run.directory / CONFIG, read_values(self._run.directory) | kept)
        except OSError as error:
            line += f"; not kept for a restart: {error.strerror}"
        self._run.say(line)
        return line

    def pause(self, paused: bool) -> None:
        """Take no further batch while `paused`. Samplers did not let the learner wait before the end of a pause."""
        self.is_paused = paused
        if not (paused or self._in_step):
            self._recorded_at = self._waiting_since = time.monotonic()
        self._rollouts.pause(paused)

    async def _set_bound(self, key: str, value: Any) -> None:
        """Change S, the period or the learning rate from the next batch on."""
        if key == "publish_every_steps":
            if value > (most := self.bound.max_staleness + 1):
                raise UserError(f"{key} {value} is above max_staleness + 1, which is {most}: raise max_staleness first")
            self._every_steps = value
        before, bound = self.bound, replace(self.bound, step=self._rollouts.taken, **{key: value})
        period = publication_period(self._every_steps, bound.max_staleness)
        # Before the await, so that of changes that come together each holds.
        self.bound = bound = replace(bound, publish_every_steps=period)
        await self._run.journal.write([bound])
        if bound.max_staleness < before.max_staleness:
            self._publication.due.set()
        await self._rollouts.set_bound(bound.max_staleness)

    def _changeable(self) -> dict[str, Any]:
        return {
            "paused": self.is_paused,
            "max_staleness": self.bound.max_staleness,
            "publish_every_steps": self.bound.publish_every_steps,
            "learning_rate": self.bound.learning_rate or self._config.resolved_learning_rate,
            "max_cost": self._provisioning.max_cost,
        }

    # -- waiting ---------------------------------------------------------------------------------------------

    async def _next_batch(self, publishing: asyncio.Task[None]) -> list[Group] | None:
        """Return the next batch, or None once the budget is spent or the user stops the run. Publish if that becomes
        due: after S was lowered, rollouts of the published version may be too old. Raise the error of a failed
        publication, since without the version a batch may never come."""
        if self._is_enough():
            await unless_stopped(self._stop, publishing)
            return None
        self._waiting_since = time.monotonic()
        batch = asyncio.create_task(self._rollouts.next_batch())
        try:
            while not batch.done():
                asked = [asyncio.create_task(one.wait()) for one in (self._publication.due, self._save_wanted)]
                try:
                    await self._first_of(batch, *asked, *([] if publishing.done() else [publishing]))
                finally:
                    for task in asked:
                        task.cancel()
                if publishing.done():
                    publishing.result()
                if batch.done():
                    break
                if self._is_enough():
                    await unless_stopped(self._stop, publishing)
                    return None
                if self._publication.due.is_set():
                    await unless_stopped(self._stop, publishing)
                    await unless_stopped(self._stop, self._publication.publish(self.step))
                    self._publication.due.clear()
                if self._save_wanted.is_set():
                    self._save_wanted.clear()
                    await self.leave_off()
            self._waited_s = time.monotonic() - self._waiting_since
            return batch.result()
        finally:
            batch.cancel()

    def _is_enough(self) -> bool:
        return self._provisioning.spent.is_set() or self._stop.is_set()

    async def _patiently(self, task: asyncio.Task[None]) -> None:
        """Wait for `task`, which depends on samplers, until the budget is spent or the user stops the run."""
        try:
            await self._first_of(task)
            if task.done():
                task.result()
        finally:
            task.cancel()

    async def _first_of(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait until one of `tasks` is done, the budget is spent, or the user stops the run. Report long waits."""
        enough = asyncio.create_task(unless_stopped(self._stop, self._provisioning.spent.wait()))
        try:
            while not (await asyncio.wait({*tasks, enough}, timeout=STALL_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                if not self.is_paused:
                    self._say_stall()
        finally:
            enough.cancel()

    def _say_stall(self) -> None:
        counts = self._rollouts.status()
        samplers, leased = len(self._rollouts.samplers), counts["samples_leased"]
        self._run.say(f"waiting for rollouts: {samplers} samplers, {leased} samples leased")
        self._run.log.event("waiting", samplers=samplers, samples_leased=leased)

    # -- after a step ----------------------------------------------------------------------------------------

    def _is_for_publication(self) -> bool:
        newest, period = self._publication.newest.version, self.bound.publish_every_steps
        return is_for_publication(self.step, newest, period, self._config.steps) or self._publication.due.is_set()

    async def _save_if_due(self) -> None:
        again = bool(self._training.save_fault) and time.monotonic() - self._save_failed_at > SAVE_AGAIN_S
        wanted = self._save_soon or self._save_wanted.is_set()
        if self.step % self._config.checkpoint_every_steps == 0 or again or wanted:
            self._save_soon = False
            self._save_wanted.clear()
            self._save_failed_at = time.monotonic()
            await self._training.save()

    async def _evaluate(self) -> None:
        """Measure the newest version. Training goes on meanwhile."""
        version = await self._publication.settled()
        if self._auditing is not None:
            self._auditing.measured = version
        # One that was measured before a restart is not measured again: there may be no samplers now.
        if not self.held_out or self.held_out[-1]["version"] != version.version:
            self._measured(await self._rollouts.evaluate(version, self._held_out_prompts))

    def _measured(self, result: Evaluated) -> None:
        figures = held_out_figures(result.scores)
        self.held_out.append({"version": result.version, "newest_version": result.newest, **figures})
        self._unsaid = {f"eval_{name}": value for name, value in self.held_out[-1].items()}
        if result.unaudited:
            self.held_out[-1]["unaudited"] = 1
        self._run.log.event("evaluated", **self.held_out[-1], prompts=len(result.scores))
        self._run.say(f"version {result.version}: {_held_out_line(figures)}{', unaudited' * result.unaudited}")
        if self._best is self.held_out[-1]:
            self._run.log.event("best", **self._best)
            self._keep_near_best()

    @property
    def _best(self) -> dict[str, float] | None:
        """The best held-out result: the most right answers, then the highest mean reward; of equals the first."""
        return max(self.held_out, key=lambda one: (one["exact_match"], one.get("reward", 0.0)), default=None)

    def _keep_near_best(self) -> None:
        """Keep the checkpoint nearest to the best version, and write one after the next step if there is none since."""
        if (best := self._best) is not None:
            version, saved = int(best["version"]), self._training.saved_step
            self._training.best = version
            # Of the model that the run began with there is no checkpoint, and the last one may be nearer than the next.
            self._save_soon = version > 0 and (saved is None or self.step + 1 - version < version - saved)

    def _record(self, batch: list[Group], step: int, trained: Trained) -> dict[str, Any]:
        """Record a step, and return its figures. There is no await in between, because `status` may be called at every
        one."""
        self.step = step + 1
        ages = [staleness(group.oldest_version, step) for group in batch]
        self.max_staleness_seen = max(self.max_staleness_seen, *ages)
        scores = [s.score for group in batch for s in group.samples if s.score]
        now = time.monotonic()
        broadcast_s, period_s = self._publication.tracker.last_broadcast_s, max(1e-6, now - self._recorded_at)
        figures: dict[str, Any] = {
            **step_figures(self.step, scores, trained),
            **self._mismatch_by_class(trained),
            **self._rollouts.age(mean_staleness=fmean(ages), broadcast_steps=(broadcast_s or 0.0) / period_s),
            "broadcast_s": broadcast_s,
            **self._publication.tracker.newest_figures(),
            "rollouts_per_s": self._rollouts.tally.recent.per_s("rollouts", now=now),
            "tokens_per_s": self._rollouts.tally.recent.per_s("tokens", now=now),
            "samplers": len(self._rollouts.samplers),
            "reward_failed_share": self._rollouts.failures.take_share(),
            **self._provisioning.stepped(waited_s=self._waited_s, period_s=period_s),
            **self._unsaid,
        }
        answers = (s.rollout for group in batch for s in group.samples if s.rollout)
        self._recent.append((period_s, Counter(staleness(a.oldest, step) for a in answers if a.oldest is not None)))
        self._recorded_at, self._unsaid = now, {}
        if self._auditing is not None:
            self._auditing.trained_s += trained.seconds
            self._auditing.step = self.step
            figures |= self._auditing.figures()
        self._run.log.metrics({**figures, "time": round(time.time(), 3)})
        if now - self._said_at >= SAY_S:
            self._said_at, pace_s = now, median(s for s, _ in self._recent)
            words = f"reward {figures['reward']:.3f}, staleness {fmean(ages):.1f}, {pace_s:.3g} s a step"
            self._run.say(f"step {self.step}/{self._config.steps}: {words}")
        return figures

    def _mismatch_by_class(self, trained: Trained) -> dict[str, float]:
        """Return the mean k3 by class of engine, as far as samplers have named theirs."""
        sums: dict[str, tuple[float, float]] = {}
        for node, (nats, tokens) in trained.mismatches.items():
            # Samplers choose the name.
            name = self._rollouts.tally.engine_of(NodeId(node))
            if CLASS.fullmatch(name) and len(sums.keys() | {name}) <= MAX_CLASSES:
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + nats, before[1] + tokens
        return {f"mismatch_kl/{name}": nats / tokens for name, (nats, tokens) in sums.items() if tokens}

    def _look(self, batch: list[Group], figures: Mapping[str, float]) -> None:
        """Raise alarms if the step taught nothing, or if rewards failed."""
        failed = rewards_failed(figures["reward_failed_share"], self._rollouts.failures.reason)
        taught = self._signal.stepped(batch, figures)
        self._alarms.told([alarm for alarm in (failed, taught) if alarm is not None], step=self.step)


def _held_out_line(figures: Mapping[str, float]) -> str:
    if figures["samples"] == 1:
        return f"held-out exact match {figures['exact_match']:.3f}"
    return f"held-out pass@1 {figures['pass_at_1']:.3f}, pass@{figures['samples']} {figures['pass_at_k']:.3f}"
