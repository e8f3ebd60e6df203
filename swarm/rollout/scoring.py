"""Rewards in the background: one task a group, whose outcomes go back to the plane; and what follows from failures.

The rule. A rollout whose reward raises, hangs, ends its process or is no finite number is a failure, whatever became of
its neighbours. The user says what becomes of it (`reward_failure`). "zero": it gets 0 and counts in its group, so that
what is trained on is what the policy drew. "redraw": the plane has its sample drawn again (plane.unscorable), or drops
its group; so answers on which the reward fails are missing from the data. "stop": the first one ends the run.

In any case a reward that does nothing but fail ends the run, since volunteers work for nothing: MAX_IN_A_ROW failures
without one score between them. What one node alone sends says little of the reward, once that has given a score: then
MAX_OF_ONE.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby

from swarm.errors import UserError
from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.plane.heldout import WRONG
from swarm.types import NodeId, RewardFailure, Score, Unscored

Scorer = Callable[[Sequence[ScoreWanted]], Awaitable[Sequence[Score | Unscored]]]
"""Gives the outcomes of the first few, one at least."""

MAX_IN_A_ROW = 64  # Even of a reward that fails for four completions of five, so many in a row are one in 1.6 million

MAX_OF_ONE = 512
"""Of one node, which may be broken, or want the run to end: twice what it may hold before its first answer."""

EVENT_EVERY_S = 10.0
"""Between two events of failures, each of which says how many it stands for: a broken reward fails in hundreds."""

REASON_LENGTH = 400


class Scoring:
    """Calls `scorer`; `scored(wanted, outcomes)` hears what came of it, for rollouts of one group at a time.

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
        while wanted:
            outcomes = await self._scorer(wanted)
            self._on_scored(wanted[: len(outcomes)], outcomes)
            wanted = wanted[len(outcomes) :]


class RewardFailures:
    """Failures of the reward: what the plane is told of them, and what `emit` is. `in_a_row`: since the last score, of
    `_authors`. `now` in seconds."""

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
        """Of the last failure."""

    def settle(
        self, wanted: Sequence[ScoreWanted], outcomes: Sequence[Score | Unscored], *, now: float
    ) -> list[Score | Unscored]:
        """The outcomes as the plane is to take them. UserError if they end the run."""
        for asked, outcome in zip(wanted, outcomes, strict=True):
            self._since[isinstance(outcome, Unscored)] += 1
            if isinstance(outcome, Unscored):
                self.in_a_row += 1
                self._authors.add(asked.node)
                self.reason = outcome.reason[:REASON_LENGTH]
                self._say(asked, now)
                self._check(asked)
            else:
                self.in_a_row, self._works = 0, True
                self._authors.clear()
        return [WRONG if self._failure == "zero" and isinstance(one, Unscored) else one for one in outcomes]

    def take_share(self) -> float:
        """Of the completions since this was last asked, those whose reward failed."""
        share = self._since[True] / (self._since.total() or 1)
        self._since.clear()
        return share

    def _check(self, asked: ScoreWanted) -> None:
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

    def _say(self, asked: ScoreWanted, now: float) -> None:
        self._unsaid += 1
        if self._said_at is not None and now - self._said_at < EVENT_EVERY_S:
            return
        self._emit(
            "reward_failed",
            prompt=asked.prompt.prompt_id,
            rollout=asked.rollout.rollout_id,
            reason=self.reason,
            rollouts=self._unsaid,
        )
        self._unsaid, self._said_at = 0, now
