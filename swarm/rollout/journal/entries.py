"""What the journal records, and what it returns after a crash. Plain data; only training groups are recorded.

Entries are written in the order in which the plane returned them: a rollout comes after the opening of its group, and a
batch after the scores of all its rollouts. A batch may be trained on once its BatchTaken is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.types import GroupId, NodeId, Observed, Rollout, Score, VersionId
from swarm.wire import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened:
    """Training group `number` was opened, with the task's prompt `prompt_number`. `max_staleness` was the bound
    then."""

    number: int
    prompt_number: int
    version: VersionId
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLeased:
    """`node` works on these `samples` (index and attempt) from now on, even if another node did before."""

    number: int
    node: NodeId
    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAccepted:
    """A sample's one answer was accepted."""

    number: int
    node: NodeId
    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTaken:
    """Turn number `turn` of an episode that goes on: what `node` drew, and what the environment said to it."""

    number: int
    turn: int
    node: NodeId
    drawn: Rollout
    said: Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReturned:
    """An accepted rollout cannot be scored, or a sampler that drew any of it was caught, perhaps before the episode had
    ended. It counts as never accepted, and its sample is drawn again."""

    number: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutScored:
    """The reward of an accepted rollout."""

    number: int
    index: int
    score: Score


NO_VARIANCE = "no_variance"  # Why a group was dropped: all its rewards were equal, and another takes its place


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped:
    """A group left the plane without being trained on. It had `rollouts` accepted rollouts, counted by node in `nodes`.
    Its oldest token was drawn by version `oldest`, and it was judged by `next_batch` and `max_staleness`. `number` is
    None for held-out prompts, which are not recorded."""

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
    """Batch `step` was taken: its groups in the order of training, and the bound that it was checked against."""

    step: int
    max_staleness: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """`version` is about to be announced. `content` is a digest of all its weights."""

    version: VersionId
    content: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSet:
    """The staleness bound and the publication period from now on, and the peak of the learning rate from batch `step`
    on; None is the configured one."""

    max_staleness: int
    publish_every_steps: int
    step: int = 0
    learning_rate: float | None = None


Record = (
    GroupOpened
    | SamplesLeased
    | TurnTaken
    | RolloutAccepted
    | RolloutReturned
    | RolloutScored
    | GroupDropped
    | BatchTaken
)
"""What the plane wants recorded, in its order, before a request is answered or a batch is trained on."""

Entry = Record | VersionPublished | BoundSet


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """An accepted rollout, read back. `score` is None if its reward had not arrived yet."""

    node: NodeId
    rollout: Rollout
    score: Score | None


@dataclass(frozen=True, slots=True)
class RecordedLease:
    """A sample's last lease to `node`, read back."""

    index: int
    node: NodeId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group, read back. `leases` has all its leases in their order, also of samples that are answered,
    and `turns` those of its episodes under way."""

    number: int
    prompt_number: int
    version: VersionId
    max_staleness: int
    rollouts: tuple[RecordedRollout, ...]
    leases: tuple[RecordedLease, ...] = ()
    turns: tuple[TurnTaken, ...] = ()


RECALLED_GROUPS = 16_384  # Groups, newest first, whose rewards a resumed run recalls to select prompts by


class Tried(NamedTuple):
    """The rewards of a complete group: how many, their sum and range. It was in batch `step`, or dropped before it."""

    number: int
    prompt_number: int
    step: int
    tries: int
    total: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Where a run stood. `groups` holds the open and the ready groups in order of their numbers; `opened` is the next
    number, and `replaced` counts the groups dropped as NO_VARIANCE since the last batch. `tried` has these and
    the groups of batches, in the order of steps and numbers, of the last RECALLED_GROUPS."""

    next_batch: int
    opened: int
    groups: tuple[RecordedGroup, ...]
    published: VersionPublished | None
    bound: BoundSet | None
    replaced: int = 0
    tried: tuple[Tried, ...] = ()
    given: Mapping[NodeId, tuple[int, int]] = field(default_factory=dict)  # Accepted rollouts and tokens, by node
