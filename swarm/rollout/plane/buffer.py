"""Complete groups that wait to be trained on, earliest deadline first."""

from __future__ import annotations

from collections import Counter

from swarm.rollout.plane.leases import Group
from swarm.rollout.plane.rules import deadline, is_fresh


class Buffer:
    """Ready groups. Who keeps it bounded: the pacing rule opens at most (S + 1) * B groups that are fresh."""

    def __init__(self, *, batch_groups: int) -> None:
        self._batch_groups = batch_groups
        self._ready: list[Group] = []
        self._ages: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, group: Group) -> None:
        assert group.complete
        self._ready.append(group)
        self._ages[group.oldest_version] += 1

    def by_deadline(self, max_staleness: int) -> Counter[int]:
        """How many ready groups there are, by deadline."""
        return Counter({deadline(version, max_staleness): count for version, count in self._ages.items()})

    def expire(self, next_batch: int, max_staleness: int) -> list[Group]:
        """Remove and return what may not be in batch `next_batch` or any later one."""
        fresh = [g for g in self._ready if is_fresh(g.oldest_version, next_batch, max_staleness)]
        stale = [g for g in self._ready if not is_fresh(g.oldest_version, next_batch, max_staleness)]
        self._keep(fresh)
        return stale

    def count(self, next_batch: int, max_staleness: int) -> int:
        """How many ready groups may be in batch `next_batch`."""
        return sum(count for version, count in self._ages.items() if is_fresh(version, next_batch, max_staleness))

    def can_take(self, next_batch: int, max_staleness: int) -> bool:
        """True if a whole batch is ready."""
        return self.count(next_batch, max_staleness) >= self._batch_groups

    def first(self, next_batch: int, max_staleness: int) -> list[Group]:
        """The groups that batch `next_batch` would hold: the B fresh ones that are due earliest."""
        fresh = [g for g in self._ready if is_fresh(g.oldest_version, next_batch, max_staleness)]
        fresh.sort(key=lambda g: (g.deadline(max_staleness), g.order))
        return fresh[: self._batch_groups]

    def take(self, next_batch: int, max_staleness: int) -> list[Group]:
        """Batch `next_batch`: B groups, earliest deadline first, each of which is fresh (I1 is guaranteed here)."""
        batch = self.first(next_batch, max_staleness)
        assert len(batch) == self._batch_groups
        taken = {g.group_id for g in batch}
        self._keep([g for g in self._ready if g.group_id not in taken])
        return batch

    def _keep(self, groups: list[Group]) -> None:
        self._ready = groups
        self._ages = Counter(group.oldest_version for group in groups)
