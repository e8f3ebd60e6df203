"""How many groups may be open and when a batch is taken: the formulas of admission, and what they have to remember.

One thing beyond the formula: a node that asks ahead, with samples still in its hands, gets none of the last B places
before a deadline: what is leased to it waits behind what it is doing, and who could begin at once would go without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from swarm.rollout.admission import may_open, may_take


class Pacing:
    """`hold_s`: see PlaneRules. Times are monotonic seconds."""

    def __init__(self, *, batch_groups: int, hold_s: float) -> None:
        self._batch_groups = batch_groups
        self._hold_s = hold_s
        self._ready_at: float | None = None

    def may_open(self, due: int, by_deadline: Mapping[int, int], next_batch: int, *, ahead: bool) -> bool:
        """May one more group that is due at `due` be opened for a node, which asks `ahead` of its engine or not?"""
        spare = -self._batch_groups if ahead else 0
        return may_open(due, by_deadline, next_batch, self._batch_groups, spare)

    @property
    def holds(self) -> bool:
        """Whether a whole batch may have to wait."""
        return self._hold_s > 0

    def is_whole(self, ready: int) -> bool:
        """Whether `ready` groups make the batch that the learner waits for."""
        if ready >= self._batch_groups:
            return True
        self._ready_at = None
        return False

    def may_take(self, others: Mapping[int, int], next_batch: int, *, now: float) -> bool:
        """Whether a whole batch is taken, which would leave `others` behind, by deadline."""
        if not self.holds or may_take(others, next_batch, self._batch_groups):
            return True
        self._ready_at = now if self._ready_at is None else self._ready_at
        return now >= self._ready_at + self._hold_s

    def hold_until(self) -> float | None:
        """When a batch that waits will be taken in any case; None if none waits, or waits without limit."""
        if self._ready_at is None or math.isinf(self._hold_s):
            return None
        return self._ready_at + self._hold_s

    def taken(self) -> None:
        """A batch was taken."""
        self._ready_at = None
