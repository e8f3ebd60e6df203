"""Rewards in the background: one task a group, whose outcome goes back to the plane; and when to speak of failures.

The rule. A rollout whose reward raises, hangs, ends its process or is no finite number is a failure, whatever became of
its neighbours. The plane has its sample drawn anew (plane.unscorable), or drops its group. That costs volunteers their
work, so a reward that does nothing but fail ends the run: MAX_IN_A_ROW failures without one score between them. What
one node alone sends says little of the reward, once that has given a score: then MAX_OF_ONE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby

from swarm.errors import UserError
from swarm.rollout.effects import ScoreWanted
from swarm.types import NodeId, Score, Unscored

Scorer = Callable[[Sequence[ScoreWanted]], Awaitable[Sequence[Score | Unscored]]]

MAX_IN_A_ROW = 64
"""Even of a reward that fails for four completions of five, so many in a row are one in 1.6 million."""

MAX_OF_ONE = 512
"""Of one node, which may be broken, or want the run to end: twice what it may hold before its first answer."""

EVENT_EVERY_S = 10.0
"""Between two events of failures, each of which says how many it stands for: a broken reward fails in hundreds."""

REASON_LENGTH = 400


class Scoring:
    """Calls `scorer`; `scored(wanted, outcomes)` hears what came of it, for one group at a time.

    `fault` is what scoring raised that is not the reward's (a full disk, say), and must end the run.
    """

    def __init__(
        self, scorer: Scorer, *, scored: Callable[[Sequence[ScoreWanted], Sequence[Score | Unscored]], None]
    ) -> None:
        self._scorer = scorer
        self._on_scored = scored
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: BaseException | None = None

    def begin(self, wanted: Sequence[ScoreWanted]) -> None:
        """Have these scored; those of one group stand together."""
        for _, group in groupby(wanted, key=lambda asked: asked.group_id):
            task = asyncio.create_task(self._score(list(group)))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.fault = self.fault or fault

    async def _score(self, wanted: list[ScoreWanted]) -> None:
        self._on_scored(wanted, await self._scorer(wanted))


class RewardFailures:
    """Failures of the reward, as `emit` is to hear of them. `in_a_row`: since the last score, of `_authors`. `now` in
    seconds."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._unsaid = 0
        self._said_at: float | None = None
        self._authors: set[NodeId] = set()
        self._works = False
        self.in_a_row = 0

    def note(self, wanted: Sequence[ScoreWanted], outcomes: Sequence[Score | Unscored], *, now: float) -> None:
        """UserError once a reward does nothing but fail."""
        for asked, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, Unscored):
                self.in_a_row += 1
                self._authors.add(asked.node)
                self._say(asked, outcome.reason[:REASON_LENGTH], now)
            else:
                self.in_a_row, self._works = 0, True
                self._authors.clear()
            most = MAX_OF_ONE if self._works and len(self._authors) == 1 else MAX_IN_A_ROW
            if isinstance(outcome, Unscored) and self.in_a_row >= most:
                raise UserError(
                    f"the reward failed {self.in_a_row} times in a row, last for prompt {asked.prompt.prompt_id}: "
                    f"{outcome.reason[:REASON_LENGTH]}; mend it (`echo-node tasks try` shows what it says), then go on "
                    "with `echo-node lead --resume RUN_DIR`"
                )

    def _say(self, asked: ScoreWanted, reason: str, now: float) -> None:
        self._unsaid += 1
        if self._said_at is not None and now - self._said_at < EVENT_EVERY_S:
            return
        self._emit(
            "reward_failed",
            prompt=asked.prompt.prompt_id,
            rollout=asked.rollout.rollout_id,
            reason=reason,
            rollouts=self._unsaid,
        )
        self._unsaid, self._said_at = 0, now
