"""Rewards in the background: one task a group, whose outcome goes back to the plane."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby

from swarm.rollout.effects import ScoreWanted
from swarm.types import Score

Scorer = Callable[[Sequence[ScoreWanted]], Awaitable[list[Score]]]


class ScoringFailed(Exception):
    """Raised by a Scorer whose rewards could not be computed."""


class Scoring:
    """Calls `scorer`; `scored(wanted, scores)` and `failed(wanted, why)` hear what came of it, for one group at a time.

    `fault` is what scoring raised that is not the reward's (a full disk, say), and must end the run.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        scored: Callable[[Sequence[ScoreWanted], Sequence[Score]], None],
        failed: Callable[[Sequence[ScoreWanted], str], None],
    ) -> None:
        self._scorer = scorer
        self._on_scored = scored
        self._on_failed = failed
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
            self.fault = fault

    async def _score(self, wanted: list[ScoreWanted]) -> None:
        try:
            scores = await self._scorer(wanted)
        except ScoringFailed as error:
            self._on_failed(wanted, str(error))
        else:
            self._on_scored(wanted, scores)
