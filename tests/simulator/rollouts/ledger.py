"""What is on record, read naively: one pass over the committed entries, each checked against those before it.

Theory of operation. The ledger is the simulator's journal reader, and shares no code with the real one. It follows a
group from its opening to its one end, a batch or a drop, and refuses an entry that cannot follow: so the lineage of
steps that survives every crash is the list of its batches, and each accepted rollout is in at most one of them (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from swarm.rollout.journal.entries import (
    BatchTaken,
    BoundSet,
    Entry,
    GroupDropped,
    GroupOpened,
    RecordedGroup,
    RecordedLease,
    RecordedRollout,
    RecordedRun,
    RolloutAccepted,
    RolloutReturned,
    RolloutScored,
    SamplesLeased,
    Tried,
    TurnTaken,
    VersionPublished,
)
from swarm.types import NodeId, Rollout, Score
from swarm.wire import digest


@dataclass(slots=True, kw_only=True)
class Recorded:
    """What is known of one group: to whom its samples were leased, and its end, which is the step that
    trained on it or why it was dropped."""

    opened: GroupOpened
    rollouts: dict[int, tuple[NodeId, Rollout]] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    leases: list[RecordedLease] = field(default_factory=list)
    turns: list[TurnTaken] = field(default_factory=list)
    returned: list[Rollout] = field(default_factory=list)
    end: int | str | None = None
    ended_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """What a step consumes."""

    rollout: Rollout
    score: Score


class Ledger:
    """The committed entries of a run. `breach(rule, what)` is called with an entry that cannot be true."""

    def __init__(self, group_size: int, breach: Callable[[str, str], NoReturn]) -> None:
        self._group_size = group_size
        self._breach = breach
        self.groups: list[Recorded] = []
        self.batches: list[tuple[int, ...]] = []
        self.published: VersionPublished | None = None
        self.bound: BoundSet | None = None

    def read(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._enter(entry)

    def run(self) -> RecordedRun:
        """What a new life of the learner finds."""
        return RecordedRun(
            next_batch=len(self.batches),
            opened=len(self.groups),
            groups=tuple(_found(group) for group in self.groups if group.end is None),
            published=self.published,
            bound=self.bound,
            replaced=sum(g.end == "no_variance" and g.ended_before == len(self.batches) for g in self.groups),
            tried=tuple(sorted((_tried(g) for g in self.groups if _counts(g)), key=lambda one: (one.step, one.number))),
        )

    def batch(self, step: int) -> list[ScoredRollout]:
        """What step `step` consumes, in order."""
        return [
            ScoredRollout(rollout=group.rollouts[index][1], score=group.scores[index])
            for group in (self.groups[number] for number in self.batches[step])
            for index in range(self._group_size)
        ]

    def accepted(self) -> int:
        """Rollouts on record."""
        return sum(len(group.rollouts) for group in self.groups)

    def dropped(self) -> int:
        """Rollouts of groups that ended without a step."""
        return sum(len(group.rollouts) for group in self.groups if isinstance(group.end, str))

    def _enter(self, entry: Entry) -> None:
        match entry:
            case GroupOpened():
                self._require(entry.number == len(self.groups), f"group {entry.number} follows {len(self.groups) - 1}")
                self.groups.append(Recorded(opened=entry))
            case SamplesLeased():
                group = self._open(entry.number)
                group.leases += [RecordedLease(index, entry.node, attempt) for index, attempt in entry.samples]
            case TurnTaken():
                group, place = self._open(entry.number), (entry.drawn.index, entry.turn)
                turns = [one.drawn for one in group.turns if one.drawn.index == place[0]]
                known = sum(one.length for one in turns) if entry.drawn.finish == "handed" else len(turns)
                self._require(place[0] not in group.rollouts and known == place[1], f"turn {place} is out of turn")
                group.turns.append(entry)
            case RolloutAccepted():
                group, index = self._open(entry.number), entry.rollout.index
                self._require(index not in group.rollouts, f"{entry.rollout.rollout_id} is on record twice")
                parts = b"".join(
                    one.drawn.token_ids for one in group.turns if one.drawn.index == index and not entry.rollout.turns
                )
                goes_on = entry.rollout.token_ids.startswith(parts) and len(entry.rollout.token_ids) > len(parts)
                self._require(goes_on, f"{entry.rollout.rollout_id} is not what was handed over")
                group.rollouts[index] = (entry.node, entry.rollout)
                group.turns = [one for one in group.turns if one.drawn.index != index]
            case RolloutReturned():
                group = self._open(entry.number)
                under_way = [one for one in group.turns if one.drawn.index == entry.index]
                group.turns = [one for one in group.turns if one not in under_way]
                if not under_way:
                    fits = entry.index in group.rollouts and entry.index not in group.scores
                    self._require(fits, f"sample {entry.index} of group {entry.number} is returned out of turn")
                    group.returned.append(group.rollouts.pop(entry.index)[1])
            case RolloutScored():
                group = self._open(entry.number)
                fits = entry.index in group.rollouts and entry.index not in group.scores
                self._require(fits, f"sample {entry.index} of group {entry.number} is scored out of turn")
                group.scores[entry.index] = entry.score
            case GroupDropped():
                self._require(entry.number is not None, "a held-out group is on record")
                group = self._open(entry.number or 0)
                self._require(entry.rollouts == len(group.rollouts), f"group {entry.number} had other rollouts")
                self._require(entry.nodes == _authors(group), f"group {entry.number} was not by {entry.nodes}")
                self._require(entry.next_batch == len(self.batches), f"group {entry.number} names a wrong batch")
                group.end, group.ended_before = entry.reason, entry.next_batch
            case BatchTaken():
                self._take(entry)
            case VersionPublished():
                later = self.published is None or entry.version > self.published.version
                self._require(later, f"{entry.version} was published out of turn")
                self.published = entry
            case BoundSet():
                self.bound = entry

    def _take(self, entry: BatchTaken) -> None:
        self._require(entry.step == len(self.batches), f"batch {entry.step} follows {len(self.batches) - 1}")
        for number in entry.numbers:
            group = self._open(number)
            whole = len(group.scores) == self._group_size
            self._require(whole, f"group {number} of batch {entry.step} is not whole on record")
            group.end = entry.step
        self.batches.append(entry.numbers)

    def _open(self, number: int) -> Recorded:
        known = 0 <= number < len(self.groups)
        self._require(known and self.groups[number].end is None, f"group {number} is not open on record")
        return self.groups[number]

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self._breach("I3", f"on record: {what}")


def content_of(batch: Sequence[ScoredRollout], before: bytes) -> bytes:
    """A stand-in for the weights that come of training on `batch`: they depend on every rollout and on the order."""
    said = [f"{one.rollout.rollout_id} {one.rollout.tokens()} {one.score.reward}" for one in batch]
    return digest(before + "\n".join(said).encode())


def _authors(group: Recorded) -> dict[NodeId, int]:
    nodes = [node for node, _ in group.rollouts.values()]
    return {node: nodes.count(node) for node in nodes}


def _found(group: Recorded) -> RecordedGroup:
    return RecordedGroup(
        number=group.opened.number,
        prompt_number=group.opened.prompt_number,
        version=group.opened.version,
        max_staleness=group.opened.max_staleness,
        rollouts=tuple(
            RecordedRollout(node=node, rollout=rollout, score=group.scores.get(index))
            for index, (node, rollout) in group.rollouts.items()
        ),
        leases=tuple(group.leases),
        turns=tuple(group.turns),
    )


def _counts(group: Recorded) -> bool:
    return isinstance(group.end, int) or group.end == "no_variance"


def _tried(group: Recorded) -> Tried:
    rewards = [score.reward for score in group.scores.values()]
    return Tried(
        number=group.opened.number,
        prompt_number=group.opened.prompt_number,
        step=group.end if isinstance(group.end, int) else group.ended_before,
        tries=len(rewards),
        total=sum(rewards),
        lowest=min(rewards),
        highest=max(rewards),
    )
