"""Which rollouts may be trained on, and how many groups may be open: the staleness bound (I1) and its pacing.

Terms. Step t takes batch t and makes version t + 1 from version t. `next_batch` (n) is the index of the next batch to
take: t while the learner waits for batch t, t + 1 while step t runs. A group whose oldest token was drawn by version v
has the deadline v + S: batch v + S is the last one that may hold it.

`is_fresh` alone decides the bound. It is asked when a rollout is submitted (a courtesy to its sampler) and again when a
batch is taken (the guarantee, I1).

Pacing adds two things to the formula. A node that asks ahead, with samples still in its hands, gets none of the last B
places before a deadline: its samples would wait behind its present work, while another node could begin at once. And
where whole batches never wait (`hold_s` 0), `spare` groups more than can be trained are opened if the learner has
lately waited for the last, long answers of a batch whose places were all given away. If more groups than these were
missing, the fleet is too slow or S too small (S = 0 always), and spare groups would only crowd out long answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping


def deadline(version: int, max_staleness: int) -> int:
    """The last batch that may hold a group whose oldest token is of `version`."""
    return version + max_staleness


def staleness(version: int, next_batch: int) -> int:
    """Learner steps completed when batch `next_batch` is taken, minus `version`."""
    return next_batch - version


def is_fresh(version: int, next_batch: int, max_staleness: int) -> bool:
    """True while a group of `version` may still be in batch `next_batch` (I1)."""
    return staleness(version, next_batch) <= max_staleness


def publication_period(every_steps: int, max_staleness: int) -> int:
    """Learner steps between two publications. With a longer one the learner would wait for ever for rollouts that are
    fresh enough."""
    return min(every_steps, max_staleness + 1)


def is_for_publication(step: int, newest: int, period: int, last_step: int) -> bool:
    """Whether version `step` is published. It counts from the newest version, not from 0: after S was raised, and the
    period with it, the next multiple could be further off than any rollout may be old."""
    return step - newest >= period or step == last_step


def may_open(
    new_deadline: int, by_deadline: Mapping[int, int], next_batch: int, batch_groups: int, spare: int = 0
) -> bool:
    """The pacing rule: may one more group with `new_deadline` be opened?

    `by_deadline` counts the groups that are leased or ready, by deadline. With the new group, for every d from its own
    deadline on, the groups with deadlines n..d must number at most (d - n + 1) * B, so that earliest deadline first can
    train all; `spare` (see Pacing) is added to that number. Earlier d are not asked: if too many are due by then,
    keeping this one back would not help them.
    """
    if new_deadline < next_batch:
        return False
    last = max((d for d in by_deadline if by_deadline[d]), default=new_deadline)
    total = 1
    for d in range(next_batch, max(last, new_deadline) + 1):
        total += by_deadline.get(d, 0)
        if d >= new_deadline and total > (d - next_batch + 1) * batch_groups + spare:
            return False
    return True


def may_take(others: Mapping[int, int], batch: Mapping[int, int], next_batch: int, batch_groups: int) -> bool:
    """Can batch n be taken without leaving behind more groups than necessary? Groups are counted by deadline: those in
    `batch`, and all `others` that are leased or ready.

    For every d >= n at most (d - n) * B others may be due by d: this many can be trained after batch n and by d. Where
    more are due (S was lowered, or leases passed their deadlines), waiting would not help them; then no more may be
    left behind than if all were ready and the B due earliest were taken.
    """
    everything = Counter(others) + Counter(batch)
    return _excess(others, next_batch, batch_groups, taken=1) <= _excess(everything, next_batch, batch_groups, taken=0)


def _excess(by_deadline: Mapping[int, int], next_batch: int, batch_groups: int, *, taken: int) -> int:
    """How many of the groups due from n on fit none of the batches from n + taken on, earliest deadline first."""
    total = excess = 0
    for d in range(next_batch, max(by_deadline, default=next_batch) + 1):
        total += by_deadline.get(d, 0)
        excess = max(excess, total - (d - next_batch + 1 - taken) * batch_groups)
    return excess


SPARE_SHARE = 1 / 8
"""Largest share of a batch that is spare, and largest share missing for which any is. In simulation the learner then
waits less than 1 % of the time (benchmarks.staleness), wherever a fleet can be fast enough."""

SPARE_GAIN = 0.5  # Spare groups for each that was missing when the learner began to wait; others end meanwhile
SPARE_KEPT = 0.95  # What is left of `spare` after a batch for which the learner did not wait: 20 batches of memory


class Pacing:
    """Decides when groups are opened and batches taken. `hold_s`: see PlaneRules. Times are monotonic seconds."""

    def __init__(self, *, batch_groups: int, hold_s: float) -> None:
        self._batch_groups = batch_groups
        self._hold_s = hold_s
        self._ready_at: float | None = None
        self._missing = 0
        self._spare = 0.0

    def may_open(self, due: int, by_deadline: Mapping[int, int], next_batch: int, *, ahead: bool) -> bool:
        """May one more group with deadline `due` be opened for a node that asks `ahead` of its engine, or does not?"""
        spare = -self._batch_groups if ahead else int(self._spare)
        return may_open(due, by_deadline, next_batch, self._batch_groups, spare)

    def is_whole(self, ready: int) -> bool:
        """Whether `ready` groups make the batch that the learner waits for."""
        if ready >= self._batch_groups:
            return True
        self._ready_at = None
        self._missing = self._missing or self._batch_groups - ready
        return False

    def may_take(self, others: Mapping[int, int], batch: Mapping[int, int], next_batch: int, *, now: float) -> bool:
        """Whether a whole `batch` may be taken, leaving `others` behind; both are counted by deadline."""
        if not self._hold_s or may_take(others, batch, next_batch, self._batch_groups):
            return True
        self._ready_at = now if self._ready_at is None else self._ready_at
        return now >= self._ready_at + self._hold_s

    def hold_until(self) -> float | None:
        """When a batch that waits will be taken in any case; None if none waits, or waits without limit."""
        if self._ready_at is None or math.isinf(self._hold_s):
            return None
        return self._ready_at + self._hold_s

    def taken(self) -> None:
        """A batch was taken. How many groups it lacked when first asked for decides how many are spare."""
        most = SPARE_SHARE * self._batch_groups
        if 0 < self._missing <= most and not self._hold_s:
            self._spare = min(most, self._spare + SPARE_GAIN * self._missing)
        else:
            self._spare *= SPARE_KEPT
        self._ready_at, self._missing = None, 0
