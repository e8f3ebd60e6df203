"""The samples that one question of a node is granted, as they are gathered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.rollout.journal.entries import GroupOpened, SamplesLeased
from swarm.rollout.plane.leases import Group, LeaseTable, Share
from swarm.types import NodeId


@dataclass(slots=True, kw_only=True)
class Claim:
    """What `node` is granted so far. `capacity` more samples it can take on, `at_once` of them can begin at once."""

    table: LeaseTable
    node: NodeId
    now: float
    capacity: int
    at_once: int
    shares: list[Share] = field(default_factory=list)
    records: list[GroupOpened | SamplesLeased] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(len(share.specs) for share in self.shares)

    @property
    def held_out(self) -> int:
        """How many of the samples answer held-out prompts."""
        return sum(len(share.specs) for share in self.shares if share.group.purpose == "eval")

    def take(self, group: Group, most: int) -> int:
        """Lease up to `most` waiting samples of `group`; how many there were."""
        share = self.table.claim(group, self.node, min(most, self.capacity), now=self.now)
        count = len(share.specs)
        if count:
            self.shares.append(share)
            self.capacity -= count
            self.at_once = max(0, self.at_once - count)
            if group.purpose == "train":
                indices = tuple(spec.index for spec in share.specs)
                self.records.append(SamplesLeased(number=group.order, node=self.node, indices=indices))
        return count

    def take_of(self, groups: Iterable[Group], most: int) -> None:
        """Lease up to `most` samples of `groups`, in their order."""
        for group in groups:
            if min(most, self.capacity) <= 0:
                break
            most -= self.take(group, most)
