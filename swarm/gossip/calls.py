"""Calls under way: a ticket for each, and what to make of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from swarm.gossip.effects import Call
from swarm.gossip.messages import Exchange
from swarm.gossip.rules import GossipRules
from swarm.types import Address, NodeId

Purpose = Literal["round", "push", "poll", "refresh", "seed", "revive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A call under way."""

    node: NodeId
    address: Address
    purpose: Purpose
    sent_at: float


class Calls:
    """Every ticket comes back exactly once, answered or failed, within its time limit: that bounds the table."""

    def __init__(self, rules: GossipRules, random: Random) -> None:
        self._rules = rules
        self._random = random
        self._pending: dict[int, Pending] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._pending)

    def to(
        self, node: NodeId, addresses: tuple[Address, ...], purpose: Purpose, message: Exchange, *, now: float
    ) -> Call:
        """A call to one of the node's addresses."""
        address = self._random.choice(addresses)
        self._last += 1
        self._pending[self._last] = Pending(node=node, address=address, purpose=purpose, sent_at=now)
        timeout_s = self._rules.call_s + message.hold_s
        return Call(ticket=self._last, node=node, address=address, message=message, timeout_s=timeout_s)

    def take(self, ticket: int) -> Pending:
        return self._pending.pop(ticket)
