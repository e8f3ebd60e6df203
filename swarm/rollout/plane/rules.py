"""Which rollouts may be trained on, and how many groups may be open: the staleness bound (I1) and its pacing.

Terms. Step t takes batch t and makes version t + 1 from version t. `next_batch` (n) is the index of the next batch to
take: t while the learner waits for batch t, t + 1 while step t runs. A group whose oldest token was drawn by version v
has the deadline v + S: batch v + S is the last one that may hold it.

`is_fresh` alone decides the bound. The plane asks it when a rollout is submitted (a courtesy to its sampler) and again
when a batch is taken (the guarantee, I1).

Pacing adds three things to the formula. First, a node that asks ahead, while it still holds samples, gets none of the
last B places before a deadline, or below the aim: its samples would wait behind its present work, while another node
could begin at once.
Second, Pacing opens `spare` groups more than can be trained if the learner
has lately waited for the last, long answers of a batch whose places were all given away. If more groups than these
were missing, the fleet is too slow or S too small (S = 0 always), and spare groups would only crowd out long answers.
Third, it opens no group that would be trained older than the fleet makes necessary: a group of version v that is opened
behind q others will be in batch n + q / B, or later if its node needs more time than that. So its expected staleness is
n - v + max(q / B, time for an answer / time of a step), and this must be below `aim`. The aim rises when the learner
has to wait, and falls while more groups are ready than it takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Literal

AgedBy = Literal["bound", "broadcast", "generation"]
"""Why rollouts are so old: groups are opened as early as the bound allows; or most of their age is versions in transit;
or it is samples being drawn, and ready ones that wait for their batch."""


def deadline(version: int, max_staleness: int) -> int:
    """Return the last batch that may hold a group whose oldest token was drawn by `version`."""
    return version + max_staleness


def staleness(version: int, next_batch: int) -> int:
    """Return how many steps the learner is ahead of `version` when it takes batch `next_batch`."""
    return next_batch - version


def is_fresh(version: int, next_batch: int, max_staleness: int) -> bool:
    """Return whether a group of `version` may still be in batch `next_batch` (I1)."""
    return staleness(version, next_batch) <= max_staleness


def publication_period(every_steps: int, max_staleness: int) -> int:
    """Return the learner steps between two publications. With a longer period the learner would wait for ever for
    rollouts that are fresh enough."""
    return min(every_steps, max_staleness + 1)


def is_for_publication(step: int, newest: int, period: int, last_step: int) -> bool:
    """Return whether version `step` is published. The period counts from the newest version, not from 0: after S was
    raised, and the period with it, the next multiple could be further away than the staleness bound allows."""
    return step - newest >= period or step == last_step


def may_open(
    new_deadline: int, by_deadline: Mapping[int, int], next_batch: int, batch_groups: int, spare: int = 0
) -> bool:
    """Return whether one more group with `new_deadline` may be opened: the pacing rule.

    `by_deadline` counts the groups that are leased or ready, by deadline. For every d from `new_deadline` on, at most
    (d - n + 1) * B groups, with the new one, may have deadlines n..d. Then earliest deadline first can train them all.
    `spare` (see Pacing) is added to that number. Earlier d are not checked: if too many groups are due by then, holding
    this one back would not help them.
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


SPARE_SHARE = 1 / 8
"""Spare groups are at most this share of a batch, and their number grows only if at most this share was missing. In
simulation the learner then waits less than 1 % of the time (benchmarks.staleness), if the fleet can be fast enough."""

SPARE_GAIN = 0.5  # Spare groups added per group that was missing when the learner began to wait; others end meanwhile
SPARE_KEPT = 0.95  # Share of `spare` that remains after a batch without a wait: a memory of 20 batches

FIRST_AIM = 5.0  # Steps, until the first batches have shown what the fleet can do: a broadcast may take some
SURPLUSES = 8  # Batches without a wait, of which the least surplus lowers the aim: versions may come every few steps
STOCK_SHARE = 0.1  # Share of a batch that may always be ready beyond it: the luck of the draw takes it now and then
LOWERED_BY = 0.3  # Share of what is always ready beyond that stock, for each batch
MAX_PARTS = 4  # In which a batch is handed out: smaller ones save little age, and engines draw them more slowly

MIN_PATIENCE_S, MAX_PATIENCE_S = 1.0, 120.0  # Of a learner whose steps are shorter or longer
STEP_WEIGHT = 0.2  # Of the last step in the mean time of a step: a memory of five steps


def smoothed(mean: float, value: float, *, weight: float) -> float:
    """Return an exponential mean after one more value. Infinity is a mean of nothing."""
    return value if math.isinf(mean) else mean + weight * (value - mean)


def aged_by(*, aim: float, max_staleness: int, mean_staleness: float, broadcast_steps: float) -> AgedBy:
    """Return what makes rollouts of `mean_staleness` as old as they are. All four are in steps."""
    if aim >= max_staleness + 1:
        return "bound"
    return "broadcast" if broadcast_steps >= mean_staleness / 2 else "generation"


class Pacing:
    """Decides when groups are opened. If it is not `adaptive`, they are opened as early as the bound allows. Times are
    monotonic seconds."""

    def __init__(self, *, batch_groups: int, adaptive: bool) -> None:
        self._batch_groups = batch_groups
        self._missing = 0
        self._spare = 0.0
        self.aim = FIRST_AIM if adaptive else math.inf  # Groups are opened below this expected staleness, in steps
        self._left = 0
        self._surpluses: deque[int] = deque(maxlen=1)  # Of the last batches: the first aim falls with each of them
        self._parts = 1
        self._waited: deque[bool] = deque(maxlen=SURPLUSES)  # Whether the learner waited for each of the last batches
        self._since, self._patience = 0, SURPLUSES if adaptive else math.inf  # Batches before more parts are tried
        self._looked_at = self._late_at = 0.0  # When the learner last asked for a batch, and when its batch is late
        self._taken_at: float | None = None
        self._step_s = math.inf

    def may_open(
        self,
        version: int,
        by_deadline: Mapping[int, int],
        next_batch: int,
        max_staleness: int,
        *,
        ahead: bool,
        answer_s: float = 0.0,
    ) -> bool:
        """Return whether one more group of `version` may be opened for a node that takes `answer_s` for a sample: one
        expected to be younger than `aim`, or one that a waiting learner needs. `ahead`: the node has no free place."""
        before = sum(count for due, count in by_deadline.items() if due >= next_batch)
        steps = max(before / self._batch_groups, self._steps(answer_s)) + ahead
        is_needed = self.waits and before < self._batch_groups
        if not is_needed and staleness(version, next_batch) + steps >= self.aim:
            return False
        spare = -self._batch_groups if ahead else int(self._spare)
        return may_open(deadline(version, max_staleness), by_deadline, next_batch, self._batch_groups, spare)

    def may_claim(self, version: int, next_batch: int, *, answer_s: float) -> bool:
        """Return whether a node that takes `answer_s` for a sample may have one of a group of `version` that others
        began. If the learner waits, it may, however slow it is: there may be no other."""
        return self.waits or staleness(version, next_batch) + self._steps(answer_s) < self.aim

    def at_most(self, samples: int, group_size: int) -> int:
        """Return how many of `samples` one question may be given."""
        return samples if self._parts == 1 else min(samples, max(1, self._batch_groups // self._parts) * group_size)

    def _steps(self, seconds: float) -> float:
        return seconds / self._step_s if self._step_s > 0 else 0.0

    def is_whole(self, ready: int, max_staleness: int, *, now: float) -> bool:
        """Return whether `ready` groups fill the batch that the learner waits for. If not, remember how many it lacked
        at first, and aim for that many more."""
        self._looked_at = now
        if not self.waits:
            step_s = 0.0 if self._taken_at is None else now - self._taken_at
            self._late_at = now + min(MAX_PATIENCE_S, max(MIN_PATIENCE_S, step_s))
        if ready >= self._batch_groups:
            self._left = ready - self._batch_groups
            return True
        if not self.waits:
            self._missing = self._batch_groups - ready
            if self._taken_at is not None:
                self._surpluses = deque(maxlen=SURPLUSES)
                self.raise_aim(self._missing / self._batch_groups, max_staleness)
        return False

    @property
    def waits(self) -> bool:
        """Whether the learner has looked for its next batch and lacked groups."""
        return self._missing > 0

    def is_late(self, *, now: float) -> bool:
        """Return whether the learner has waited longer for its batch than its last step took."""
        return self.waits and now > self._late_at

    def raise_aim(self, steps: float, max_staleness: int) -> None:
        """Let groups be opened that are so many steps older. At the most the rule of deadlines alone forbids anything,
        with all that it has to spare."""
        most = max_staleness + 1 + SPARE_SHARE
        self.aim = min(self.aim + steps, max(most, self.aim))

    def taken(self) -> None:
        """Note that the batch was taken that the learner asked for last. Adjust `spare` by how many groups it lacked
        when first asked for, and the aim by how many were left."""
        most = SPARE_SHARE * self._batch_groups
        if 0 < self._missing <= most:
            self._spare = min(most, self._spare + SPARE_GAIN * self._missing)
        else:
            self._spare *= SPARE_KEPT
        self._lower_aim()
        self._fit_parts()
        if self._taken_at is not None:
            self._step_s = smoothed(self._step_s, self._looked_at - self._taken_at, weight=STEP_WEIGHT)
        self._missing, self._taken_at = 0, self._looked_at

    def interrupted(self) -> None:
        """Leave the time since the last batch out of the time of a step."""
        self._taken_at = None

    def _lower_aim(self) -> None:
        if self.waits:
            self._surpluses.clear()
            return
        self._surpluses.append(self._left)
        if len(self._surpluses) == self._surpluses.maxlen:
            needless = max(0.0, min(self._surpluses) / self._batch_groups - STOCK_SHARE)
            self.aim = max(1.0, self.aim - LOWERED_BY * needless)

    def _fit_parts(self) -> None:
        """Hand out a batch in more parts, since an engine in lockstep draws all that it was given before it takes a
        newer version; in fewer if the learner waits for more than one of eight batches. Try more again ever later."""
        self._waited.append(self.waits)
        self._since += 1
        if (often := sum(self._waited) > 1) and self._parts > 1:
            self._parts, self._patience = self._parts // 2, 2 * self._patience
        elif not often and self._since >= self._patience and self._parts < MAX_PARTS:
            self._parts *= 2
        else:
            return
        self._since = 0
        self._waited.clear()
