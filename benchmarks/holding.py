"""A plane whose learner waits for what a full batch would leave behind, if it is patient.

The product's learner never waits: it loses a few of the longest answers, and opens spare groups instead. With patience
and without faults nothing is discarded, which is what docs/staleness.md proves of the pacing rule (I7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.rollout.plane.rules import Pacing, deadline
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
    """If it is `patient`, holds full batches that would leave others behind, and opens no spare groups."""

    def __init__(self, *, batch_groups: int, patient: bool, adaptive: bool) -> None:
        super().__init__(batch_groups=batch_groups, adaptive=adaptive)
        self._patient = patient
        self._holds = False

    @property
    def waits(self) -> bool:
        return super().waits or self._holds

    def is_whole(self, ready: int, max_staleness: int, *, now: float) -> bool:
        whole = super().is_whole(ready, max_staleness, now=now)
        self._holds = self._holds and whole
        return whole

    def may_take(self, others: Mapping[int, int], batch: Mapping[int, int], next_batch: int) -> bool:
        """Return whether a full `batch` may be taken, leaving `others` behind. Both count groups by deadline."""
        may = not self._patient or may_take(others, batch, next_batch, self._batch_groups)
        self._holds = self._holds or not may
        return may

    def taken(self) -> None:
        super().taken()
        self._holds = False
        if self._patient:
            self._spare = 0.0


class HoldingPlane(RolloutPlane):
    """The product's plane with a HoldingPacing. If it is not `patient` it does what the product's does."""

    def __init__(self, rules: PlaneRules, *, prompts: Callable[[int], Prompt], patient: bool) -> None:
        super().__init__(rules, prompts=prompts)
        self._pacing: HoldingPacing = HoldingPacing(
            batch_groups=rules.groups_per_step, patient=patient, adaptive=rules.adaptive
        )

    def can_take(self, *, now: float) -> bool:
        waited = self._pacing.waits
        if not super().can_take(now=now):
            return False
        due = Counter(deadline(group.oldest_version, self.max_staleness) for group in self.full_batch())
        may = self._pacing.may_take(self._by_deadline() - due, due, self.next_batch)
        self.leased.chances += not (may or waited)
        return may
