"""The checkers' own account of the groups that are open or ready: who holds what, and what was answered."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from swarm.rollout.journal.entries import RecordedGroup
from swarm.types import Lease, NodeId, Purpose, Rollout, Span
from tests.simulator.rollouts.ledger import Ledger

Holding = frozenset[tuple[str, int]]
"""Samples by group id and index."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """The books on one group that is open or ready. `born` is the version that it was opened for, `bound` S then.

    `turns` are those of episodes under way; the environment has `said` something to so many of them."""

    purpose: Purpose
    born: int
    bound: int
    size: int
    holders: dict[int, NodeId] = field(default_factory=dict)
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    begun: dict[int, Rollout] = field(default_factory=dict)
    turns: defaultdict[int, list[tuple[NodeId, Rollout]]] = field(default_factory=lambda: defaultdict(list))
    said: Counter[int] = field(default_factory=Counter)
    scored: dict[int, float] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    refused: bool = False

    @property
    def ready(self) -> bool:
        return len(self.scored) == self.size

    @property
    def flat(self) -> bool:
        """All its rewards are equal."""
        return len(set(self.scored.values())) == 1

    @property
    def oldest(self) -> int:
        """The version of its oldest token, or the opening version while a sample is outstanding."""
        versions = [oldest_of(rollout) for rollout in self.rollouts.values()]
        return min(versions if len(versions) == self.size else [*versions, self.born])

    @property
    def oldest_drawn(self) -> int:
        """The version of its oldest token so far, of episodes under way too."""
        drew = [*self.rollouts.values(), *(turn for turns in self.turns.values() for _, turn in turns)]
        return min(map(oldest_of, drew), default=self.oldest)


def oldest_of(rollout: Rollout) -> int:
    """The version number of the oldest token, from the spans themselves."""
    return min(span.version.version for span in rollout.spans)


def followed(before: Rollout | None, part: Rollout, node: str = "") -> Rollout:
    """A part after what others drew before it, token by token."""
    spans = list(before.spans) if before is not None else []
    spans += [
        Span(version=span.version, start=span.start + start, end=span.end + start, node=node)
        for start in [before.length if before is not None else 0]
        for span in part.spans
    ]
    drew = [before, part] if before is not None else [part]
    return Rollout(
        group_id=part.group_id,
        index=part.index,
        token_ids=b"".join(one.token_ids for one in drew),
        logprobs=b"".join(one.logprobs for one in drew),
        spans=tuple(spans),
        finish=part.finish,
    )


def entry_of(group: RecordedGroup, size: int, *, episodes: bool) -> Entry:
    """The books on a group that was found again: who was last given a sample that is not answered has it still. Of
    `episodes` one without a turn begins again, and so does one whose score is not on record."""
    answered = {found.rollout.index: found for found in group.rollouts}
    found = Entry(
        purpose="train",
        born=group.version.version,
        bound=group.max_staleness,
        size=size,
        rollouts={index: one.rollout for index, one in answered.items()},
        scored={index: one.score.reward for index, one in answered.items() if one.score is not None},
    )
    for turn in group.turns:
        index = turn.drawn.index
        if episodes:
            found.turns[index].append((turn.node, turn.drawn))
            found.said[index] += 1
        else:
            found.begun[index] = followed(found.begun.get(index), turn.drawn, turn.node)
    for one in group.leases:
        again = episodes and not found.said[one.index]
        found.attempts[one.index] = max(found.attempts[one.index], one.attempt + again)
        if one.index not in answered and not again:
            found.holders[one.index] = one.node
    found.refused = episodes and len(found.scored) < len(answered)
    return found


class Books:
    """All groups that are open or ready, by name, and the names of those that were closed."""

    def __init__(self) -> None:
        self.groups: dict[str, Entry] = {}
        self.closed: set[str] = set()

    def begin(self, ledger: Ledger, size: int, *, episodes: bool) -> None:
        """Write the books anew from what is on record; of held-out groups nothing is."""
        held_out = {name for name, entry in self.groups.items() if entry.purpose == "eval"}
        held_out |= {name for name in self.closed if not name.startswith("t")}
        self.closed = held_out | {f"t{i}" for i, group in enumerate(ledger.groups) if group.end is not None}
        found = ledger.run().groups
        self.groups = {f"t{group.number}": entry_of(group, size, episodes=episodes) for group in found}

    def close(self, group_id: str) -> None:
        del self.groups[group_id]
        self.closed.add(group_id)

    def forget(self, node: NodeId, keep: Holding = frozenset()) -> int:
        """Take from `node` all that it holds but `keep`; how many samples that was."""
        lost = 0
        for group_id, entry in self.groups.items():
            for index in [i for i, holder in entry.holders.items() if holder == node and (group_id, i) not in keep]:
                del entry.holders[index]
                lost += 1
        return lost

    def let_go(self, node: NodeId, group_id: str, index: int) -> bool:
        """Take a sample from `node`; False if it does not hold it."""
        entry = self.groups.get(group_id)
        holds = entry is not None and entry.holders.get(index) == node
        if entry is not None and holds:
            del entry.holders[index]
        return holds

    def refuse(self, group_id: str, index: int) -> None:
        """Enter that an answer is refused: one to train on is then taken back, a held-out one is on no record."""
        if (entry := self.groups.get(group_id)) is not None:
            entry.refused = True
            entry.attempts[index] += 1
            if entry.purpose == "eval":
                entry.rollouts.pop(index, None)

    def take_back(self, group_id: str, index: int) -> bool:
        """Forget an answer that was refused; False if none waits for a score."""
        entry = self.groups.get(group_id)
        waits = entry is not None and entry.refused and index in entry.rollouts and index not in entry.scored
        if entry is not None and waits:
            del entry.rollouts[index]
        return waits

    def is_current(self, lease: Lease, rollout: Rollout) -> bool:
        """True if the sample did not fail and was not withdrawn since the lease was given."""
        entry = self.groups.get(rollout.group_id)
        attempts = {spec.index: spec.attempt for spec in lease.samples}
        if entry is None or self.has_moved_on(entry, lease, rollout.index):
            return False
        return entry.attempts[rollout.index] == attempts[rollout.index]

    @staticmethod
    def begun_of(entry: Entry, index: int) -> bytes:
        """The tokens that were handed over of a sample that is not answered."""
        return entry.begun[index].token_ids if index in entry.begun else b""

    def is_known(self, node: NodeId, lease: Lease, rollout: Rollout) -> bool:
        """True if there is an answer already, or if this failure was counted or is no longer the node's to tell."""
        entry = self.groups.get(rollout.group_id)
        if entry is None:
            return rollout.group_id in self.closed
        current = entry.holders.get(rollout.index) == node and self.is_current(lease, rollout)
        told = rollout.finish in ("failed", "handed") and not current
        return told or self.has_moved_on(entry, lease, rollout.index) or rollout.index in entry.rollouts

    def has_moved_on(self, entry: Entry, lease: Lease, index: int) -> bool:
        """True if others drew what the lease goes on with."""
        turn = lease.episode.turn if lease.episode is not None else 0
        return self.begun_of(entry, index) != lease.begun or len(entry.turns[index]) != turn
