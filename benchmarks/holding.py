"""A plane whose learner waits for what a full batch would leave behind, up to `hold_s`.

The product's learner never waits: it loses a few of the longest answers, and opens spare groups instead. With `hold_s`
unlimited and without faults nothing is discarded, which is what docs/staleness.md proves of the pacing rule (I7).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.rollout.plane.rules import Pacing
from swarm.types import Prompt


def may_take(others: Mapping[int, int], batch: Mapping[int, int], next_batch: int, batch_groups: int) -> bool:
    """Return whether batch n can be taken without leaving behind more groups than necessary. `batch` counts its groups
    by deadline, `others` all other groups that are leased or ready.

    For every d >= n, at most (d - n) * B others may be due by d: that many can be trained after batch n and by d. Where
    more are due (S was lowered, or leases passed their deadlines), waiting would not help them. Then no more may be
    left behind than if all were ready and the first B by deadline were taken.
    """
    everything = Counter(others) + Counter(batch)
    return _excess(others, next_batch, batch_groups, taken=1) <= _excess(everything, next_batch, batch_groups, taken=0)


def _excess(by_deadline: Mapping[int, int], next_batch: int, batch_groups: int, *, taken: int) -> int:
    """Return how many groups due from n on fit no batch from n + `taken` on, in order of their deadlines."""
    total = excess = 0
    for d in range(next_batch, max(by_deadline, default=next_batch) + 1):
        total += by_deadline.get(d, 0)
        excess = max(excess, total - (d - next_batch + 1 - taken) * batch_groups)
    return excess


class HoldingPacing(Pacing):
    """Holds full batches for up to `hold_s`, and then opens no spare groups."""

    def __init__(self, *, batch_groups: int, hold_s: float, adaptive: bool) -> None:
        super().__init__(batch_groups=batch_groups, adaptive=adaptive)
        self._hold_s = hold_s
        self.ready_at: float | None = None

    @property
    def waits(self) -> bool:
        return super().waits or self.ready_at is not None

    def is_whole(self, ready: int, max_staleness: int) -> bool:
        whole = super().is_whole(ready, max_staleness)
        self.ready_at = self.ready_at if whole else None
        return whole

    def may_take(self, others: Mapping[int, int], batch: Mapping[int, int], next_batch: int, *, now: float) -> bool:
        """Return whether a full `batch` may be taken, leaving `others` behind. Both count groups by deadline."""
        if not self._hold_s or may_take(others, batch, next_batch, self._batch_groups):
            return True
        self.ready_at = now if self.ready_at is None else self.ready_at
        return now >= self.ready_at + self._hold_s

    def hold_until(self) -> float | None:
        """Return when a waiting batch is taken in any case. None if no batch waits, or if it waits without limit."""
        if self.ready_at is None or math.isinf(self._hold_s):
            return None
        return self.ready_at + self._hold_s

    def taken(self, *, now: float) -> None:
        super().taken(now=now)
        self.ready_at = None
        if self._hold_s:
            self._spare = 0.0


class HoldingPlane(RolloutPlane):
    """The product's plane with a HoldingPacing. With a `hold_s` of 0 it does what the product's does."""

    def __init__(self, rules: PlaneRules, *, prompts: Callable[[int], Prompt], hold_s: float) -> None:
        super().__init__(rules, prompts=prompts)
        self.hold_s = hold_s
        self._pacing: HoldingPacing = HoldingPacing(
            batch_groups=rules.groups_per_step, hold_s=hold_s, adaptive=rules.adaptive
        )

    def can_take(self, *, now: float) -> bool:
        waited = self._pacing.waits
        if not super().can_take(now=now):
            return False
        due = Counter(group.deadline(self.max_staleness) for group in self.full_batch())
        may = self._pacing.may_take(self._by_deadline() - due, due, self.next_batch, now=now)
        self.leased.chances += not (may or waited)
        return may

    def hold_until(self) -> float | None:
        """Return when a waiting batch is taken in any case. None if no batch waits, or if it waits without limit."""
        return None if self.paused else self._pacing.hold_until()
