"""The checkers' own account of one group, and what two accounts of a run are compared by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from swarm.rollout.entries import RecordedGroup
from swarm.types import NodeId, Purpose, Rollout


@dataclass(slots=True, kw_only=True)
class Entry:
    """The books on one group that is open or ready. `born` is the version that it was opened for, `bound` S then."""

    purpose: Purpose
    born: int
    bound: int
    size: int
    holders: dict[int, NodeId] = field(default_factory=dict)
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)
    unscorable: bool = False

    @property
    def ready(self) -> bool:
        return len(self.scored) == self.size

    @property
    def oldest(self) -> int:
        """The version of its oldest token, or the opening version while a sample is outstanding."""
        versions = [oldest_of(rollout) for rollout in self.rollouts.values()]
        return min(versions if len(versions) == self.size else [*versions, self.born])


def oldest_of(rollout: Rollout) -> int:
    """The version number of the oldest token, from the spans themselves."""
    return min(span.version.version for span in rollout.spans)


def entry_of(group: RecordedGroup, size: int) -> Entry:
    """The books on a group that was found again: who was last given a sample that is not answered has it still."""
    answered = {found.rollout.index: found for found in group.rollouts}
    return Entry(
        purpose="train",
        born=group.version.version,
        bound=group.max_staleness,
        size=size,
        holders={index: node for index, node in group.holders.items() if index not in answered},
        rollouts={index: found.rollout for index, found in answered.items()},
        scored={index for index, found in answered.items() if found.score is not None},
    )
