"""Groups that are ready for a batch, by the version of their oldest token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import structs

from swarm.rollout.journal.entries import Record, RolloutAccepted, RolloutReturned, RolloutScored
from swarm.rollout.plane.groups import Group
from swarm.rollout.plane.rules import deadline, is_fresh
from swarm.types import GroupId, Rollout


class Buffer:
    """Ready groups. The pacing rule bounds their number: it opens at most (S + 1) * B fresh groups."""

    def __init__(self, *, batch_groups: int) -> None:
        self._batch_groups = batch_groups
        self._ready: dict[int, dict[int, Group]] = {}  # By oldest version and order

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def groups(self) -> list[Group]:
        return [group for groups in self._ready.values() for group in groups.values()]

    def remove(self, group: Group) -> None:
        del self._ready[group.oldest_version][group.order]
        self._ready = {version: groups for version, groups in self._ready.items() if groups}

    def add(self, group: Group) -> None:
        assert group.complete
        self._ready.setdefault(group.oldest_version, {})[group.order] = group

    def by_deadline(self, max_staleness: int) -> Counter[int]:
        """Count the ready groups by deadline."""
        return Counter({deadline(version, max_staleness): len(groups) for version, groups in self._ready.items()})

    def count(self, next_batch: int, max_staleness: int) -> int:
        """Count the ready groups that may be in batch `next_batch`."""
        return sum(len(self._ready[version]) for version in self._fresh(next_batch, max_staleness))

    def expire(self, next_batch: int, max_staleness: int) -> list[Group]:
        """Remove and return the groups that are too old for batch `next_batch`."""
        stale = sorted(self._ready.keys() - self._fresh(next_batch, max_staleness))
        return [group for version in stale for group in self._ready.pop(version).values()]

    def first(self, next_batch: int, max_staleness: int) -> list[Group]:
        """Return the groups that batch `next_batch` would hold: the first B fresh ones by deadline."""
        fresh = self._fresh(next_batch, max_staleness)
        return [group for v in fresh for _, group in sorted(self._ready[v].items())][: self._batch_groups]

    def take(self, next_batch: int, max_staleness: int) -> list[Group]:
        """Remove and return batch `next_batch`: B groups, all of them fresh. I1 is guaranteed here."""
        batch = self.first(next_batch, max_staleness)
        assert len(batch) == self._batch_groups
        for group in batch:
            self.remove(group)
        return batch

    def _fresh(self, next_batch: int, max_staleness: int) -> list[int]:
        return sorted(version for version in self._ready if is_fresh(version, next_batch, max_staleness))

    def correct(self, own: Mapping[tuple[GroupId, int], tuple[Rollout, bytes]]) -> list[Record]:
        """Give these rollouts these log-probs, unless somebody else has answered meanwhile; the records of it."""
        records: list[Record] = []
        samples = {
            (group.group_id, i): (group.order, one) for group in self.groups() for i, one in enumerate(group.samples)
        }
        for name, (rollout, logprobs) in own.items():
            number, sample = samples.get(name, (0, None))
            if sample is None or rollout is not sample.rollout or logprobs == rollout.logprobs:
                continue
            assert sample.author is not None
            assert sample.score is not None
            sample.rollout = corrected = structs.replace(rollout, logprobs=logprobs)
            index = rollout.index
            records += [
                RolloutReturned(number=number, index=index),
                RolloutAccepted(number=number, node=sample.author, rollout=corrected),
                RolloutScored(number=number, index=index, score=sample.score),
            ]
        return records
