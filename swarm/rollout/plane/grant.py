"""The leases that one question of a node is answered with, while they are put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.rollout.journal.entries import GroupOpened, SamplesLeased
from swarm.rollout.messages import LEASE_REPLY_BYTES
from swarm.rollout.plane.effects import StepWanted
from swarm.rollout.plane.groups import Group, LeaseTable, tokens_of
from swarm.types import Lease, NodeId

TOKEN_BYTES = 5  # Of a token's id in msgpack, at most

MAX_TOKENS = LEASE_REPLY_BYTES // 2 // TOKEN_BYTES
"""Prompt tokens in one answer: with long prompts the rest comes with the next one."""


@dataclass(slots=True, kw_only=True)
class Grant:
    """The leases given to `node` so far. It can take `capacity` more samples and begin `at_once` of them right away,
    and its answer has room for prompts of `tokens` more."""

    table: LeaseTable
    node: NodeId
    now: float
    capacity: int
    at_once: int
    tokens: int = MAX_TOKENS
    leases: list[Lease] = field(default_factory=list)
    records: list[GroupOpened | SamplesLeased | StepWanted] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(len(lease.samples) for lease in self.leases)

    def take(self, group: Group, most: int) -> int:
        """Lease up to `most` waiting samples of `group`. Return how many were leased."""
        leases = self.table.claim(
            group, self.node, max(0, min(most, self.capacity)), now=self.now, max_tokens=self.tokens
        )
        count = sum(len(lease.samples) for lease in leases)
        if group.purpose == "train":
            self.records += [SamplesLeased(number=group.order, node=self.node, samples=_named(one)) for one in leases]
        self.leases += leases
        self.tokens -= sum(map(tokens_of, leases))
        self.capacity -= count
        self.at_once = max(0, self.at_once - count)
        return count

    def take_of(self, groups: Iterable[Group], most: int) -> None:
        for group in groups:
            if min(most, self.capacity) <= 0:
                break
            most -= self.take(group, most)


def _named(lease: Lease) -> tuple[tuple[int, int], ...]:
    return tuple((spec.index, spec.attempt) for spec in lease.samples)
