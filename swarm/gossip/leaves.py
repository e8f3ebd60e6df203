"""The leaves of a home: leases that their polls renew. Leaves are not gossiped one by one; a home's record counts them.

A lease is renewed by authenticated polls alone, so it needs no record to be forwarded and no clock but the home's.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.gossip.effects import Effect, LeafGone
from swarm.gossip.records import SignedRecord
from swarm.gossip.rules import MAX_LEAVES, GossipRules
from swarm.types import NodeId, VersionId


@dataclass(slots=True, kw_only=True)
class Leaf:
    """One leaf. `signed` is None until it has sent its record; `newest` is the version it last knew of."""

    heard_at: float
    signed: SignedRecord | None = None
    newest: VersionId | None = None


class LeafLeases:
    """Leaves by node, in the order of their last poll."""

    def __init__(self, rules: GossipRules) -> None:
        self._rules = rules
        self.leaves: dict[NodeId, Leaf] = {}

    def __len__(self) -> int:
        return len(self.leaves)

    def renew(self, node: NodeId, newest: VersionId | None, *, now: float) -> bool:
        """A poll of `node`; False if this home has no room for it."""
        leaf = self.leaves.pop(node, None)
        if leaf is None:
            if len(self.leaves) >= MAX_LEAVES:
                return False
            leaf = Leaf(heard_at=now)
        leaf.heard_at, leaf.newest = now, newest
        self.leaves[node] = leaf
        return True

    def tell(self, signed: SignedRecord) -> None:
        """Keep the newest record of a leaf that has a lease."""
        leaf = self.leaves.get(signed.node)
        if leaf is not None and (leaf.signed is None or signed.order > leaf.signed.order):
            leaf.signed = signed

    def lacks_record(self, node: NodeId) -> bool:
        leaf = self.leaves.get(node)
        return leaf is not None and leaf.signed is None

    def end(self, node: NodeId) -> None:
        """The leaf has left, or has become a public."""
        self.leaves.pop(node, None)

    def expire(self, *, now: float, patience: float) -> list[Effect]:
        oldest = now - patience * self._rules.lease_rounds * self._rules.round_s
        gone: list[Effect] = []
        for node, leaf in list(self.leaves.items()):
            if leaf.heard_at >= oldest:
                break
            del self.leaves[node]
            gone.append(LeafGone(node=node))
        return gone
