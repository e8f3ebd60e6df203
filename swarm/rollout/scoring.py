"""Computes rewards in the background, one task per group, and returns their outcomes to the plane.

A reward fails if it raises, hangs, ends its process or is not a finite number. The user's `reward_failure` says what
follows. "zero": the rollout gets 0 and counts in its group, so the data are what the policy drew. "redraw": the plane
has the sample drawn again or drops its group (plane.unscorable), so the data lack answers on which the reward fails.
"stop": the first failure ends the run.

A reward that only fails ends the run in any case, or volunteers would work for nothing. It does so after MAX_IN_A_ROW
failures without a score between them, or MAX_OF_ONE if the reward has worked before and one node drew all the rollouts.
A turn that an environment answers counts as a score, so one that fails in late turns alone is left to an alarm.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import groupby
from typing import Any, TypeVar

from swarm.errors import UserError, first_fault
from swarm.rollout.plane.effects import ScoreWanted, StepWanted
from swarm.rollout.plane.heldout import WRONG
from swarm.types import NodeId, Observed, RewardFailure, Score, Unscored

R = TypeVar("R")
Scorer = Callable[[Sequence[ScoreWanted]], Awaitable[Sequence[Score | Unscored]]]
"""Returns the outcomes of the first few rollouts, at least of one."""

Said = tuple[Observed, ...] | Unscored
Stepper = Callable[[StepWanted], Coroutine[Any, Any, Said]]
"""Has an environment answer the turns that it has not answered."""

GATHER_S = 0.02
"""For how long answers of environments wait for one another: what a sampler handed in together goes out together again,
and an engine in lockstep has full batches."""

LATELY = 0.2  # Weight of the newest group in how long groups wait for their rewards
MAX_IN_A_ROW = 64  # A reward that fails for four completions of five does this with a chance of one in 1.6 million

MAX_OF_ONE = 512  # One node may be broken, or may want the run to end: twice what it may hold at first
EVENT_EVERY_S = 10.0  # Shortest time between events, since a broken reward fails by the hundred; each says how many
REASON_LENGTH = 400


class Scoring:
    """Calls `scorer`, then `scored(wanted, outcomes)` with the outcomes for rollouts of one group; and `stepper`, then
    `stepped` with what environments said to turns that came together. `fault` is an error
    in scoring that is not the reward's (a full disk, say). It must end the run. `waiting` rollouts have no reward yet;
    `took_s` is how long a group waited for its rewards lately."""

    def __init__(
        self,
        scorer: Scorer,
        *,
        scored: Callable[[Sequence[ScoreWanted], Sequence[Score | Unscored]], None],
        stepper: Stepper | None = None,
        stepped: Callable[[Sequence[tuple[StepWanted, Said]]], None] = lambda said: None,
    ) -> None:
        self._scorer = scorer
        self._on_scored = scored
        self._stepper = stepper
        self._on_stepped = stepped
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: BaseException | None = None
        self.waiting = 0
        self.took_s = 0.0

    def begin(self, wanted: Sequence[ScoreWanted]) -> None:
        """Begin to score these rollouts. The caller keeps those of one group together."""
        self.waiting += len(wanted)
        for _, group in groupby(wanted, key=lambda asked: asked.group_id):
            self._start(self._score(list(group)))

    def step(self, wanted: Sequence[StepWanted]) -> None:
        """Begin to have environments answer these turns, which came together."""
        if wanted:
            self._start(self._step(wanted))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.fault = self.fault or first_fault(fault)

    async def _step(self, wanted: Sequence[StepWanted]) -> None:
        assert self._stepper is not None
        async with asyncio.TaskGroup() as group:
            asked = {group.create_task(self._stepper(one)): one for one in wanted}
            waiting = {*asked}
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if waiting:
                    more, waiting = await asyncio.wait(waiting, timeout=GATHER_S)
                    done |= more
                self._on_stepped([(asked[task], task.result()) for task in done])

    async def _score(self, wanted: list[ScoreWanted]) -> None:
        began = time.monotonic()
        while wanted:
            outcomes = await self._scorer(wanted)
            self.waiting -= len(outcomes)
            self.took_s += LATELY * (time.monotonic() - began - self.took_s)
            self._on_scored(wanted[: len(outcomes)], outcomes)
            wanted = wanted[len(outcomes) :]


class RewardFailures:
    """Decides what follows from failed rewards, and emits events about them. `in_a_row` counts failures since the last
    score, `reason` belongs to the last failure. `now` is in seconds."""

    def __init__(self, emit: Callable[..., None], failure: RewardFailure) -> None:
        self._emit = emit
        self._failure = failure
        self._unsaid = 0
        self._said_at: float | None = None
        self._authors: set[NodeId] = set()
        self._works = False
        self._since = Counter[bool]()
        self.in_a_row = 0
        self.reason = ""
        self._dropped = 0

    def settle(
        self, wanted: Sequence[ScoreWanted | StepWanted], outcomes: Sequence[R | Unscored], *, now: float
    ) -> list[R | Score | Unscored]:
        """Return the outcomes for the plane. Raise UserError if they end the run."""
        for asked, outcome in zip(wanted, outcomes, strict=True):
            self._since[isinstance(outcome, Unscored)] += 1
            if isinstance(outcome, Unscored):
                self.in_a_row += 1
                self._authors |= {asked.node} if isinstance(asked, ScoreWanted) else set(asked.nodes)
                self.reason = outcome.reason[:REASON_LENGTH]
                self._say(asked, now)
                self._check(asked)
            else:
                self.in_a_row, self._works = 0, True
                self._authors.clear()
        return [WRONG if self._failure == "zero" and isinstance(one, Unscored) else one for one in outcomes]

    def dropped(self, reason: str) -> None:
        """Count a group that was lost to its reward or environment. UserError after MAX_IN_A_ROW without a score: its
        environment may answer first turns, which are no scores, for ever."""
        if reason not in ("reward_failed", "environment_failed"):
            return
        self._dropped += 1
        if self._dropped >= MAX_IN_A_ROW:
            why = (
                self.reason
                if reason == "reward_failed"
                else (
                    "their episodes were over before the first turn; what is read first may be longer than "
                    "--max-episode-tokens"
                )
            )
            raise UserError(
                f"{self._dropped} groups in a row were lost and no rollout was scored: {why}; mend the task, then go "
                "on with `echo-node lead --resume RUN_DIR`"
            )

    def scored(self) -> None:
        """A rollout was scored: forget what was dropped before."""
        self._dropped = 0

    def take_share(self) -> float:
        """Return the share of rewards that failed since the last call."""
        share = self._since[True] / (self._since.total() or 1)
        self._since.clear()
        return share

    def _check(self, asked: ScoreWanted | StepWanted) -> None:
        most = MAX_OF_ONE if self._works and len(self._authors) == 1 else MAX_IN_A_ROW
        if self._failure == "stop":
            how = 'and reward_failure is "stop"'
        elif self.in_a_row >= most:
            how = f"{self.in_a_row} times in a row"
        else:
            return
        raise UserError(
            f"the reward failed {how}, last for prompt {asked.prompt.prompt_id}: {self.reason}; mend it "
            "(`echo-node tasks try` shows what it says), then go on with `echo-node lead --resume RUN_DIR`"
        )

    def _say(self, asked: ScoreWanted | StepWanted, now: float) -> None:
        self._unsaid += 1
        if self._said_at is not None and now - self._said_at < EVENT_EVERY_S:
            return
        self._emit(
            "reward_failed",
            prompt=asked.prompt.prompt_id,
            rollout=f"{asked.group_id}/{asked.index}",
            reason=self.reason,
            rollouts=self._unsaid,
        )
        self._unsaid, self._said_at = 0, now
