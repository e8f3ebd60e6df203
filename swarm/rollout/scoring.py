"""Computes rewards in the background, one task per group, and returns their outcomes to the plane.

A reward fails if it raises, hangs, ends its process or is not a finite number. The rollout then gets 0 and counts in
its group, so the data are what the policy drew.

A reward that only fails ends the run, or volunteers would work for nothing. It does so after MAX_IN_A_ROW failures
without a score between them, if an audit drew those answers again. Anybody can make up an answer that no audit can draw
again, so these count only after QUIET_S without a score. An answer that its sampler's seed does not draw does not
count: others draw its sample (plane.refused). A turn that an environment answers counts as a score, so one that fails
in late turns alone is left to an alarm.

A free process goes to the sampler whose rewards took the fewest seconds lately (SamplerStats.recent), so that none can
hold up the others with answers that keep a reward busy until its limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import groupby
from math import inf
from typing import Any, TypeVar

from msgspec.structs import replace

from swarm.errors import UserError, first_fault
from swarm.rollout.plane.effects import ScoreWanted, StepWanted
from swarm.rollout.plane.heldout import WRONG
from swarm.rollout.tally import SamplerStats
from swarm.types import GroupId, NodeId, Observed, Score, Unscored

R = TypeVar("R")
Scorer = Callable[[Sequence[ScoreWanted]], Awaitable[Sequence[Score | Unscored]]]
"""Returns the outcomes of the first few rollouts, at least of one."""
Genuine = Callable[[ScoreWanted], Awaitable[bool | None]]
"""Returns whether a sampler's seed draws its rollout; None if no audit can tell."""

Said = Observed | Unscored
Stepper = Callable[[StepWanted], Coroutine[Any, Any, Said]]
"""Has an environment answer the last turn."""

LATELY = 0.2  # Weight of the newest group in how long groups wait for their rewards
MAX_IN_A_ROW = 64  # A reward that fails for four completions of five does this with a chance of one in 1.6 million

QUIET_S = 900.0  # An honest sampler has a score in this time: a lease lasts 600 s by default, a step some minutes
TURN_S = 1.0  # In which a sampler's answers begin before others have the process: most groups take some milliseconds
ASKED_FROM = 8  # Failures in a row from which an audit is asked whether answers were drawn; or one that took long
EVENT_EVERY_S = 10.0  # Shortest time between events, since a broken reward fails by the hundred; each says how many
REASON_LENGTH = 400


class Scoring:
    """Calls `scorer`, `processes` times at once at most, then `scored(wanted, outcomes)` with outcomes for rollouts of
    one group and sampler. Of a group that is not `is_open` any more nothing is scored. If a reward fails, `genuine` is
    asked first. `fault` is an error in scoring that is not the reward's (a full disk, say), and must end the run.
    `waiting` rollouts have no reward yet; `took_s` is how long a group waited for its rewards lately."""

    def __init__(
        self,
        scorer: Scorer,
        processes: int,
        genuine: Genuine,
        samplers: Mapping[NodeId, SamplerStats],
        *,
        is_open: Callable[[GroupId], bool],
        scored: Callable[[Sequence[ScoreWanted], Sequence[Score | Unscored]], None],
    ) -> None:
        self._scorer = scorer
        self._is_open = is_open
        self._on_scored = scored
        self._free = processes
        self._in_a_row = 0
        self._genuine = genuine
        self._samplers = samplers
        self._queues: dict[NodeId, deque[tuple[float, list[ScoreWanted]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: BaseException | None = None
        self.waiting = 0
        self.took_s = 0.0

    def begin(self, wanted: Sequence[ScoreWanted]) -> None:
        """Begin to score these rollouts. The caller keeps those of one group together."""
        self.waiting += len(wanted)
        for (_, node), asked in groupby(wanted, key=lambda one: (one.group_id, one.node)):
            self._queues.setdefault(node, deque()).append((time.monotonic(), list(asked)))
        self._give_turns()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin other work whose errors end the run too."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.fault = self.fault or first_fault(fault)

    def _lately(self, node: NodeId, now: float) -> float:
        stats = self._samplers.get(node)
        return inf if stats is None else stats.recent.per_s("reward_s", now=now)  # One that left is the last

    def _give_turns(self) -> None:
        while self._free and self._queues:
            now = time.monotonic()
            node = min(self._queues, key=lambda one: self._lately(one, now))
            came_at, wanted = self._queues[node].popleft()
            if not self._queues[node]:
                del self._queues[node]
            if self._is_open(wanted[0].group_id):
                self._free -= 1
                self.start(self._score(node, came_at, wanted))
            else:
                self.waiting -= len(wanted)

    async def _score(self, node: NodeId, came_at: float, wanted: list[ScoreWanted]) -> None:
        began = time.monotonic()
        outcomes = await self._scorer(wanted)
        now = time.monotonic()
        if (stats := self._samplers.get(node)) is not None:
            stats.recent.add("reward_s", now - began, now=now)
            stats.reward_failures += sum(isinstance(one, Unscored) for one in outcomes)
        self.took_s += LATELY * (now - came_at - self.took_s)
        asked, rest = wanted[: len(outcomes)], wanted[len(outcomes) :]
        if rest:
            self._queues.setdefault(node, deque()).appendleft((came_at, rest))
        self._free += 1
        self._give_turns()
        # Each takes a pass of the trainer, so not for every answer of a reward that fails now and then.
        for outcome in outcomes:
            self._in_a_row = self._in_a_row + 1 if isinstance(outcome, Unscored) else 0
        if self._in_a_row >= ASKED_FROM or now - began > TURN_S:
            outcomes = [await self._judged(*one) for one in zip(asked, outcomes, strict=True)]
        self._finish(asked, outcomes)

    async def _judged(self, asked: ScoreWanted, outcome: Score | Unscored) -> Score | Unscored:
        if isinstance(outcome, Unscored):
            outcome = replace(outcome, genuine=await self._genuine(asked))
            if outcome.genuine is False:
                # What waits of this sampler is not scored: each could take as long.
                for _, more in self._queues.pop(asked.node, ()):
                    self._finish(more, [outcome] * len(more))
        return outcome

    def _finish(self, wanted: Sequence[ScoreWanted], outcomes: Sequence[Score | Unscored]) -> None:
        self.waiting -= len(wanted)
        self._on_scored(wanted, outcomes)


class RewardFailures:
    """Decides what follows from failed rewards, and emits events about them. `in_a_row` counts failures since the last
    score, at `scored_at`, that may be the reward's, and `reason` belongs to the last. `now` is in seconds."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._unsaid = Counter[str]()
        self._said_at: dict[str, float] = {}
        self._since = Counter[bool]()
        self.scored_at = self._kept_at = -inf
        self.in_a_row = self._genuine = 0
        self.reason = ""
        self._dropped = 0

    def settle(
        self, wanted: Sequence[ScoreWanted | StepWanted], outcomes: Sequence[R | Unscored], *, now: float
    ) -> list[R | Score | Unscored]:
        """Return the outcomes for the plane; Unscored only of an answer that no seed draws. UserError if they end the
        run."""
        return [self._settled(*one, now) for one in zip(wanted, outcomes, strict=True)]

    def _settled(self, asked: ScoreWanted | StepWanted, outcome: R | Unscored, now: float) -> R | Score | Unscored:
        if isinstance(outcome, Unscored) and outcome.genuine is False:
            self._say("reward_refused", asked, outcome.reason, now)
            return outcome
        self._since[isinstance(outcome, Unscored)] += 1
        if not isinstance(outcome, Unscored):
            self.in_a_row, self._genuine, self.scored_at = 0, 0, now
            return outcome
        self.in_a_row += 1
        # An environment that cannot begin is no sampler's doing.
        self._genuine += outcome.genuine or (isinstance(asked, StepWanted) and asked.node is None)
        self.reason = outcome.reason[:REASON_LENGTH]
        self._say("reward_failed", asked, self.reason, now)
        self._check(asked, now)
        return WRONG

    def dropped(self, reason: str, *, now: float) -> None:
        """Count a group that was lost to its environment. UserError after MAX_IN_A_ROW and QUIET_S without a
        rollout that was scored: its environment may answer first turns, which are no scores, for ever."""
        if reason != "environment_failed":
            return
        self._dropped += 1
        if self._dropped >= MAX_IN_A_ROW and now - self._kept_at >= QUIET_S:
            raise UserError(
                f"{self._dropped} groups in a row were lost and no rollout was scored: their episodes were over before "
                "the first turn; what is read first may be longer than --max-episode-tokens; mend the task, then go on "
                "with `echo-node lead --resume RUN_DIR`"
            )

    def scored(self, *, now: float) -> None:
        """A rollout was scored: forget what was dropped before."""
        self._dropped, self._kept_at = 0, now

    def take_share(self) -> float:
        """Return the share of rewards that failed since the last call."""
        share = self._since[True] / (self._since.total() or 1)
        self._since.clear()
        return share

    def _check(self, asked: ScoreWanted | StepWanted, now: float) -> None:
        count = self.in_a_row if now - self.scored_at >= QUIET_S else self._genuine
        if count >= MAX_IN_A_ROW:
            raise UserError(
                f"the reward failed {self.in_a_row} times in a row, last for prompt {asked.prompt.prompt_id}: "
                f"{self.reason}; mend it (`echo-node tasks try` shows what it says), then go on with `echo-node lead "
                "--resume RUN_DIR`"
            )

    def _say(self, kind: str, asked: ScoreWanted | StepWanted, reason: str, now: float) -> None:
        self._unsaid[kind] += 1
        if now - self._said_at.get(kind, -inf) < EVENT_EVERY_S:
            return
        self._emit(
            kind,
            prompt=asked.prompt.prompt_id,
            rollout=f"{asked.group_id}/{asked.index}",
            reason=reason,
            rollouts=self._unsaid.pop(kind),
        )
        self._said_at[kind] = now
