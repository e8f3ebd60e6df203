"""What the journal records, and what it gives back after a crash. Plain data; only groups for training are recorded.

Entries are written in the order in which the plane returned them: a rollout comes after the opening of its group, a
batch after the scores of all that is in it. A batch may be trained on once its BatchTaken is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.net.wire import Digest
from swarm.types import GroupId, NodeId, Rollout, Score, VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened:
    """The `number`-th group for training; its prompt is the task's `number`-th. `max_staleness` is the bound then."""

    number: int
    version: VersionId
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLeased:
    """`node` works on these samples from now on, whoever did before."""

    number: int
    node: NodeId
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAccepted:
    """The one answer to its sample. `next_batch` is the batch to be taken next, and names the payload's segment."""

    number: int
    node: NodeId
    rollout: Rollout
    next_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReturned:
    """An accepted rollout that cannot be scored: it counts as never accepted, and its sample is drawn again."""

    number: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutScored:
    """The reward of an accepted rollout."""

    number: int
    index: int
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped:
    """A group left the plane without being trained on; it had `rollouts` accepted ones, counted by node in `nodes`. Its
    oldest token was of version `oldest`; `next_batch` and `max_staleness` are what it was judged by. `number` is None
    for held-out prompts, which are not recorded."""

    number: int | None
    group_id: GroupId
    reason: str
    rollouts: int
    nodes: Mapping[NodeId, int]
    oldest: int
    next_batch: int
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """Batch `step`, in the order in which the trainer gets it, and the bound that it was checked against."""

    step: int
    max_staleness: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """`version` is about to be announced. `content` is a digest over all of its weights."""

    version: VersionId
    content: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSet:
    """The user's dial, from now on."""

    max_staleness: int
    publish_every_steps: int


Record = GroupOpened | SamplesLeased | RolloutAccepted | RolloutReturned | RolloutScored | GroupDropped | BatchTaken
"""What the plane wants recorded, in this order: before a question or submission is answered or a batch trained on."""

Entry = Record | VersionPublished | BoundSet


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """An accepted rollout as it was found again. `score` is None if its reward was not yet there."""

    node: NodeId
    rollout: Rollout
    score: Score | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group as it was found again. `holders` says which node was last given a sample, answered or not, by index."""

    number: int
    version: VersionId
    max_staleness: int
    rollouts: tuple[RecordedRollout, ...]
    holders: Mapping[int, NodeId] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Where a run stood. `groups` are the open and the ready ones, by number; `opened` is the next number."""

    next_batch: int
    opened: int
    groups: tuple[RecordedGroup, ...]
    published: VersionPublished | None
    bound: BoundSet | None
