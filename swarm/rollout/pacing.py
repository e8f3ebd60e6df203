"""How many groups may be open and when a batch is taken: the formulas of admission, and what they have to remember.

Two things beyond the formula. A node that asks ahead, with samples still in its hands, gets none of the last B places
before a deadline: what is leased to it waits behind what it is doing, and who could begin at once would go without.
And where whole batches never wait (`hold_s` 0), `spare` groups more than can be trained are opened if the learner has
lately had to wait for the last, long answers of a batch in which every place was given away. Where more was missing
than these, the fleet is too slow or S too small (S = 0 always), and spare groups would only crowd out long answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from swarm.rollout.admission import may_open, may_take

SPARE_SHARE = 1 / 8
"""Most spare groups, and most that were missing for any, of a batch: in simulation (benchmarks.staleness) the learner
then waits less than 1 % of the time wherever a fleet can be fast enough."""

SPARE_GAIN = 0.5
"""Spare groups for each one that was missing when the learner began to wait; half, since others end meanwhile."""

SPARE_KEPT = 0.95
"""What is left of `spare` after a batch for which the learner did not wait: 20 batches of memory."""


class Pacing:
    """`hold_s`: see PlaneRules. Times are monotonic seconds."""

    def __init__(self, *, batch_groups: int, hold_s: float) -> None:
        self._batch_groups = batch_groups
        self._hold_s = hold_s
        self._ready_at: float | None = None
        self._missing = 0
        self._spare = 0.0

    def may_open(self, due: int, by_deadline: Mapping[int, int], next_batch: int, *, ahead: bool) -> bool:
        """May one more group that is due at `due` be opened for a node, which asks `ahead` of its engine or not?"""
        spare = -self._batch_groups if ahead else int(self._spare)
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
        self._missing = self._missing or self._batch_groups - ready
        return False

    def may_take(self, others: Mapping[int, int], batch: Mapping[int, int], next_batch: int, *, now: float) -> bool:
        """Whether a whole `batch` is taken, which would leave `others` behind; both by deadline."""
        if not self.holds or may_take(others, batch, next_batch, self._batch_groups):
            return True
        self._ready_at = now if self._ready_at is None else self._ready_at
        return now >= self._ready_at + self._hold_s

    def hold_until(self) -> float | None:
        """When a batch that waits will be taken in any case; None if none waits, or waits without limit."""
        if self._ready_at is None or math.isinf(self._hold_s):
            return None
        return self._ready_at + self._hold_s

    def taken(self) -> None:
        """A batch was taken; what was missing of it when it was first asked for decides how many are to spare."""
        most = SPARE_SHARE * self._batch_groups
        if 0 < self._missing <= most and not self.holds:
            self._spare = min(most, self._spare + SPARE_GAIN * self._missing)
        else:
            self._spare *= SPARE_KEPT
        self._ready_at, self._missing = None, 0
