"""What one node knows of the swarm, and questions about it that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from swarm.gossip.leaves import LeafLeases
from swarm.gossip.messages import Entry, Exchange, pack_digest
from swarm.gossip.owner import Owner
from swarm.gossip.records import SignedRecord
from swarm.gossip.rules import GossipRules
from swarm.gossip.table import Peer, Table
from swarm.types import Address, NodeId, VersionId


@dataclass(slots=True)
class View:
    """Itself, the publics, its leaves, and the newest head."""

    owner: Owner
    rules: GossipRules
    dialable: Callable[[Address], bool]
    table: Table = field(init=False)
    leases: LeafLeases = field(init=False)
    newest: VersionId | None = None
    head: bytes = b""

    def __post_init__(self) -> None:
        self.table = Table(self.rules, self.dialable)
        self.leases = LeafLeases(self.rules)

    @property
    def own(self) -> SignedRecord:
        return self.owner.signed

    @property
    def is_public(self) -> bool:
        return self.owner.reachability == "public"

    def learner(self) -> SignedRecord | None:
        """The learner's newest record, dead or alive: its address is the best that is known."""
        if self.owner.role == "learner":
            return self.own
        known = self.table.learner
        return known.signed if known is not None else None

    def learner_order(self) -> int:
        learner = self.learner()
        return learner.order if learner is not None else 0

    def live_learner(self) -> SignedRecord | None:
        """The learner's record, unless it is dead: a dead one's address is no news for anybody."""
        learner = self.learner()
        return learner if learner is not None and self.record_of(learner.prefix) is learner else None

    def has_newer_head(self, message: Exchange) -> bool:
        return self.newest is not None and (message.newest is None or self.newest > message.newest)

    def has_moved_learner(self, message: Exchange) -> bool:
        """Another life of the learner than the caller knows; a mere re-issue is no reason to answer a poll early."""
        learner = self.live_learner()
        return learner is not None and learner.order >> 16 > message.learner >> 16

    def usable(self, now: float) -> list[Peer]:
        """Publics that may be called now."""
        return [peer for peer in self.table if peer.retry_at <= now]

    def at_least(self, count: int, now: float) -> list[Peer]:
        """Publics that may be called now, and where these are too few, those whose turn comes next: a newcomer that
        knows one other must not fall silent because some of its first calls were lost."""
        usable = self.usable(now)
        if len(usable) >= count:
            return usable
        waiting = sorted((peer for peer in self.table if peer.retry_at > now), key=lambda peer: peer.retry_at)
        return [*usable, *waiting[: count - len(usable)]]

    def some(self, count: int, random: Random, *, now: float) -> list[Peer]:
        """Random publics to call."""
        known = self.at_least(count, now)
        return random.sample(known, min(count, len(known)))

    def home_candidates(self, now: float) -> list[NodeId]:
        """Publics to choose homes from; the learner, who has other things to do, only where there are too few."""
        usable = self.usable(now)
        others = [peer.signed.node for peer in usable if peer.signed.record.role != "learner"]
        return others if len(others) >= self.rules.homes else [peer.signed.node for peer in usable]

    def record_of(self, prefix: bytes) -> SignedRecord | None:
        if prefix == self.own.prefix:
            return self.own
        peer = self.table.by_prefix.get(prefix)
        return peer.signed if peer is not None else None

    def digest(self, now: float) -> bytes:
        """Everybody that this node knows, itself first if it is public."""
        entries = [(p.signed.prefix, p.signed.order, now - p.heard_at) for p in self.table]
        own = [(self.own.prefix, self.own.order, 0.0)] if self.is_public else []
        return pack_digest([*own, *entries])

    def ages_of(self, records: Iterable[SignedRecord], now: float) -> list[Entry]:
        """Entries for records that are passed on, so that nobody takes an old beat for a young one."""
        entries: list[Entry] = []
        for signed in records:
            if signed.prefix == self.own.prefix:
                entries.append((signed.prefix, signed.order, 0.0))
            elif (peer := self.table.by_prefix.get(signed.prefix)) is not None:
                entries.append((signed.prefix, signed.order, now - peer.heard_at))
        return entries

    def push_message(self, records: list[SignedRecord], now: float, *, head: bytes = b"") -> Exchange:
        """News that is answered with no more than what the caller got wrong."""
        return Exchange(
            digest=pack_digest(self.ages_of(records, now)),
            records=tuple(signed.sealed for signed in records),
            head=head,
            newest=self.newest,
            asks=0,
        )

    def round_message(self, now: float) -> Exchange:
        return Exchange(digest=self.digest(now), newest=self.newest)

    def refresh_message(self, now: float) -> Exchange:
        """A leaf's question for publics beyond the known ones, a few even when there are enough."""
        room = max(4, self.rules.leaf_publics - len(self.table))
        stalest = sorted(self.table, key=lambda peer: peer.heard_at)[: self.rules.refreshed]
        entries = [(p.signed.prefix, p.signed.order, now - p.heard_at) for p in stalest]
        return Exchange(digest=pack_digest(entries), newest=self.newest, learner=self.learner_order(), asks=room)
