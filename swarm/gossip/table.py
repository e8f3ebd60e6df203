"""What a node knows of the swarm: publics that are alive, dead or banned, and the leaves of a home.

Theory of operation. A public is alive while its beat is young and its record is renewed. The *beat* is the last time
that anybody heard it directly: an authenticated call or answer counts for the node that got it; everybody else learns
the age of that moment through digests and keeps the youngest. So nobody can make a live node look dead by claiming that
it is; a claim that a dead one lives is believed for one lifetime of a record at most, since only the owner can renew
it. A dead record becomes a tombstone, which outlives every copy of the record that is still under way: only a record of
a higher order brings its node back (I4).

Leaves are not gossiped one by one; a home's record counts them. A leaf's lease is renewed by its authenticated polls
only, so it needs no record to be forwarded and no clock but the home's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from random import Random
from typing import Literal

from swarm.gossip.reachability import is_name
from swarm.gossip.records import (
    MAX_BANNED,
    MAX_LEAVES,
    MAX_PER_SUBNET,
    MAX_PUBLICS,
    Appeared,
    Died,
    Effect,
    Entry,
    Exchange,
    GossipRules,
    LeafGone,
    Owner,
    Rejected,
    SignedRecord,
    pack_digest,
    prefix_of,
)
from swarm.types import Address, NodeId, VersionId


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


MAX_OTHERS = MAX_PUBLICS - 2
"""Alive at a time: with this node itself and the learner, which always finds room, their digest fits a message."""

MAX_BACK_OFF = 5  # A public that does not answer is called again after 2, 4, ... 32 rounds; its own calls end the wait.

Admitted = Literal["new", "changed", "reissued", "known", "refused", "gone"]

LASTING = frozenset({"banned_key", "prefix_taken", "address_refused", "table_full", "subnet_full"})
"""Reasons to refuse a record that hold until it is issued anew, or for a while: it is not asked for again so soon."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """One public. `risen_at` is when its order last rose here, `retry_at` when it may be called again, `addresses`
    those of its addresses that this node may call."""

    signed: SignedRecord
    addresses: tuple[Address, ...]
    heard_at: float
    risen_at: float
    failures: int = 0
    retry_at: float = -math.inf

    def heard(self, heard_at: float) -> None:
        """It called or answered itself."""
        self.heard_at = max(self.heard_at, heard_at)
        self.failures, self.retry_at = 0, -math.inf

    def failed(self, round_s: float, *, now: float) -> None:
        """A call to it came to nothing. One failure is a lost packet."""
        self.failures = min(self.failures + 1, MAX_BACK_OFF)
        self.retry_at = now + round_s * 2**self.failures if self.failures > 1 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A node that is no public any more: lost, or by its own word, which nobody need look into."""

    signed: SignedRecord
    died_at: float

    @property
    def is_lost(self) -> bool:
        return self.signed.record.reachability == "public"


class Table:
    """All publics but oneself. `dialable` says whether this node may call an address that somebody else named."""

    def __init__(self, rules: GossipRules, dialable: Callable[[Address], bool]) -> None:
        self._rules = rules
        self._dialable = dialable
        self.by_prefix: dict[bytes, Peer] = {}
        self.dead: dict[bytes, Tombstone] = {}
        self._banned: dict[NodeId, None] = {}
        self.unwanted: dict[bytes, int] = {}
        self._pardon_at = -math.inf
        self.subnets: Counter[str] = Counter()
        self._learner = b""

    def __len__(self) -> int:
        return len(self.by_prefix)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self.by_prefix.values())

    def find(self, node: NodeId) -> Peer | None:
        peer = self.by_prefix.get(prefix_of(node))
        return peer if peer is not None and peer.signed.node == node else None

    @property
    def learner(self) -> Peer | Tombstone | None:
        """The learner, dead or alive; its prefix is noted when it is first seen."""
        return self.by_prefix.get(self._learner) or self.dead.get(self._learner) if self._learner else None

    def is_banned(self, node: NodeId) -> bool:
        return node in self._banned

    def callable_at(self, signed: SignedRecord) -> tuple[Address, ...]:
        """The addresses of a record that this node may call. Names are for the learner alone, whom everybody trusts,
        and only with a certificate: whatever else the name leads to is not spoken to."""
        record = signed.record
        named = record.role == "learner"
        return tuple(a for a in record.addresses if self._dialable(a) or (named and a.fingerprint and is_name(a.host)))

    def admit(self, signed: SignedRecord, heard_at: float, *, now: float) -> tuple[Admitted, list[Effect]]:
        """Take in a record whose beat was heard at `heard_at`, as far as the one who passed it on knows."""
        admitted, effects = self._judge(signed, heard_at, now)
        if any(isinstance(effect, Rejected) and effect.reason in LASTING for effect in effects):
            self.unwanted[signed.prefix] = signed.order
            while len(self.unwanted) > MAX_PUBLICS:
                del self.unwanted[next(iter(self.unwanted))]
        return admitted, effects

    def _judge(self, signed: SignedRecord, heard_at: float, now: float) -> tuple[Admitted, list[Effect]]:
        if signed.node in self._banned:
            return "refused", [Rejected(reason="banned_key")]
        known = self.by_prefix.get(signed.prefix)
        newest = known.signed if known else self._tombstone_of(signed)
        if newest is not None:
            if newest.node != signed.node:
                return "refused", [Rejected(reason="prefix_taken")]
            if signed.order < newest.order:
                return "refused", [Rejected(reason="old_record")]
            if signed.order == newest.order:
                return self._again(newest, signed)
        if signed.record.reachability != "public":
            return self._withdraw(signed, known, now)
        if not (addresses := self.callable_at(signed)):
            return "refused", [Rejected(reason="address_refused")]
        if known is not None:
            return self._renew(known, signed, addresses, heard_at, now)
        return self._add(signed, addresses, heard_at, now)

    def pardon(self, *, now: float) -> None:
        """Once in the life of a record, ask again for what was refused: there may be room by now."""
        if now >= self._pardon_at:
            self._pardon_at = now + self._rules.life_rounds * self._rules.round_s
            self.unwanted.clear()

    def expire(self, *, now: float, patience: float) -> list[Effect]:
        """Bury whoever is too old. `patience` stretches the age of a beat while this node itself runs late."""
        rules = self._rules
        oldest_beat = now - patience * rules.dead_rounds * rules.round_s
        oldest_record = now - rules.life_rounds * rules.round_s
        effects: list[Effect] = []
        for peer in [p for p in self if p.heard_at < oldest_beat or p.risen_at < oldest_record]:
            reason = "silent" if peer.heard_at < oldest_beat else "record expired"
            effects.append(self._bury(peer, reason, now))
        forgotten = now - rules.tombstone_rounds * rules.round_s
        for prefix in [prefix for prefix, stone in self.dead.items() if stone.died_at < forgotten]:
            del self.dead[prefix]
        return effects

    def forget_old(self, *, now: float) -> None:
        """What a leaf does instead: it hears of beats once a minute, too seldom to call anybody dead."""
        oldest = now - self._rules.life_rounds * self._rules.round_s
        for peer in [p for p in self if max(p.heard_at, p.risen_at) < oldest]:
            # The learner's last address is better than none.
            if peer.signed.record.role != "learner":
                self.forget(peer)

    def is_suspect(self, peer: Peer, *, now: float) -> bool:
        return now - peer.heard_at > self._rules.suspect_rounds * self._rules.round_s

    def forget(self, peer: Peer) -> None:
        """Drop a live peer without a tombstone: a leaf that knows enough others makes room."""
        del self.by_prefix[peer.signed.prefix]
        self._count_subnets(peer.signed, -1)

    # -- transitions -----------------------------------------------------------------------------------------

    def _again(self, known: SignedRecord, signed: SignedRecord) -> tuple[Admitted, list[Effect]]:
        # The bodies: anybody can wrap the same body and signature in other bytes.
        if known.body == signed.body:
            return "known", []
        self._ban(signed)
        return "refused", [Rejected(reason="equivocation"), Died(node=signed.node, reason="equivocated")]

    def _withdraw(self, signed: SignedRecord, known: Peer | None, now: float) -> tuple[Admitted, list[Effect]]:
        """A public that has left, or can no longer be reached: a newer record of it is no public."""
        if known is not None:
            self.forget(known)
            self._lay(signed, now)
            return "gone", [Died(node=signed.node, reason=signed.record.reachability)]
        if signed.prefix in self.dead:
            self._lay(signed, now)
        return "known", []

    def _renew(
        self, peer: Peer, signed: SignedRecord, addresses: tuple[Address, ...], heard_at: float, now: float
    ) -> tuple[Admitted, list[Effect]]:
        moved = signed.record.addresses != peer.signed.record.addresses
        if moved:
            if self._is_crowded(signed, subnets_of(signed) - subnets_of(peer.signed)):
                return "refused", [Rejected(reason="subnet_full")]
            self._count_subnets(peer.signed, -1)
            self._count_subnets(signed, 1)
            peer.failures, peer.retry_at = 0, -math.inf
        peer.signed, peer.addresses, peer.risen_at = signed, addresses, now
        peer.heard_at = max(peer.heard_at, heard_at)
        return ("changed" if moved else "reissued"), []

    def _add(
        self, signed: SignedRecord, addresses: tuple[Address, ...], heard_at: float, now: float
    ) -> tuple[Admitted, list[Effect]]:
        if now - heard_at > self._rules.dead_rounds * self._rules.round_s:
            return "refused", [Rejected(reason="zombie")]
        # The learner always finds room: without it there is no swarm.
        if signed.record.role != "learner" and len(self.by_prefix) >= MAX_OTHERS:
            return "refused", [Rejected(reason="table_full")]
        if self._is_crowded(signed, subnets_of(signed)):
            return "refused", [Rejected(reason="subnet_full")]
        self.dead.pop(signed.prefix, None)
        while len(self.by_prefix) + len(self.dead) >= MAX_PUBLICS and self.dead:
            del self.dead[next(iter(self.dead))]
        self.by_prefix[signed.prefix] = Peer(signed=signed, addresses=addresses, heard_at=heard_at, risen_at=now)
        if signed.record.role == "learner":
            self._learner = signed.prefix
        self._count_subnets(signed, 1)
        return "new", [Appeared(signed=signed)]

    def _bury(self, peer: Peer, reason: str, now: float) -> Died:
        self.forget(peer)
        self._lay(peer.signed, now)
        return Died(node=peer.signed.node, reason=reason)

    def _lay(self, signed: SignedRecord, now: float) -> None:
        # Taken out and put in again: the oldest tombstone is the first one.
        self.dead.pop(signed.prefix, None)
        self.dead[signed.prefix] = Tombstone(signed=signed, died_at=now)

    def _ban(self, signed: SignedRecord) -> None:
        self._banned[signed.node] = None
        while len(self._banned) > MAX_BANNED:
            del self._banned[next(iter(self._banned))]
        if (peer := self.by_prefix.get(signed.prefix)) is not None:
            self.forget(peer)
        self.dead.pop(signed.prefix, None)

    def _tombstone_of(self, signed: SignedRecord) -> SignedRecord | None:
        stone = self.dead.get(signed.prefix)
        return stone.signed if stone else None

    def _is_crowded(self, signed: SignedRecord, subnets: set[str]) -> bool:
        return signed.record.role != "learner" and any(self.subnets[one] >= MAX_PER_SUBNET for one in subnets)

    def _count_subnets(self, signed: SignedRecord, by: int) -> None:
        for subnet in subnets_of(signed):
            self.subnets[subnet] += by
            if not self.subnets[subnet]:
                del self.subnets[subnet]


def subnets_of(signed: SignedRecord) -> set[str]:
    """The /24, /48 or name of each address."""
    return {_subnet(address.host) for address in signed.record.addresses}


@lru_cache(maxsize=2 * MAX_PUBLICS)
def _subnet(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host.lower()
    kept = 3 if address.version == 4 else 6
    return address.packed[:kept].hex()


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
