"""What a node knows of the swarm: publics that are alive, dead or banned, and the leaves of a home.

Theory of operation. A public is alive while its beat is young and its record is renewed. The *beat* is the last time
that any node heard it directly, by an authenticated call or answer. The others learn its age through digests and keep
the youngest. So no claim can make a live node look dead. A claim that a dead node lives is believed for one record's
life at most, since only the owner can renew the record. A dead record becomes a tombstone, which outlives every copy of
the record that is still under way: only a record of a higher order brings its node back (I4).

Leaves are not gossiped one by one; a home's record counts them. Only a leaf's authenticated polls renew its lease, so
no record has to be forwarded and only the home's clock matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from swarm.bounded import Bounded
from swarm.gossip.records import (
    MAX_BANNED,
    MAX_LEAVES,
    MAX_PER_HOST,
    MAX_PER_SUBNET,
    MAX_PUBLICS,
    Appeared,
    Died,
    Effect,
    GossipRules,
    LeafGone,
    Rejected,
    SignedRecord,
    prefix_of,
)
from swarm.net.hosts import Tries, is_name, network_of, open_host
from swarm.types import Address, NodeId


@dataclass(slots=True, kw_only=True)
class Leaf:
    """A leaf of this home, which called from `network`. `signed` is None until it sends its record."""

    heard_at: float
    network: str
    signed: SignedRecord | None = None


class LeafLeases:
    """Leaves by node, in the order of their last poll."""

    def __init__(self, rules: GossipRules) -> None:
        self._rules = rules
        self.leaves: dict[NodeId, Leaf] = {}

    def __len__(self) -> int:
        return len(self.leaves)

    def renew(self, node: NodeId, *, network: str, now: float) -> bool:
        """Count a poll of `node`. Return False if this home has no room for it."""
        leaf = self.leaves.pop(node, None)
        if leaf is None and len(self.leaves) >= MAX_LEAVES and not self._make_room(network):
            return False
        signed = leaf.signed if leaf else None
        self.leaves[node] = Leaf(heard_at=now, network=network, signed=signed)
        return True

    def _make_room(self, network: str) -> bool:
        """Drop the leaf that has been silent for longest of the network with the most, if `network` has two less."""
        counts = Counter(leaf.network for leaf in self.leaves.values())
        largest, most = counts.most_common(1)[0]
        if most < counts[network] + 2:
            return False
        self.end(next(node for node, leaf in self.leaves.items() if leaf.network == largest))
        return True

    def wants(self, signed: SignedRecord) -> bool:
        """Return True for a newer record than is known of a leaf that has a lease."""
        leaf = self.leaves.get(signed.node) if signed.record.reachability != "public" else None
        return leaf is not None and (leaf.signed is None or signed.order > leaf.signed.order)

    def tell(self, signed: SignedRecord) -> None:
        """Keep a record that is wanted, or drop a leaf that says in it that it has left."""
        if self.wants(signed) and signed.record.reachability == "gone":
            self.end(signed.node)
        elif self.wants(signed):
            self.leaves[signed.node].signed = signed

    def end(self, node: NodeId) -> None:
        """Drop a leaf that has left or become a public."""
        self.leaves.pop(node, None)

    def expire(self, *, now: float, patience: float) -> list[Effect]:
        """End the leases of leaves that have not polled for too long."""
        oldest = now - patience * self._rules.lease_rounds * self._rules.round_s
        gone = [node for node, leaf in self.leaves.items() if leaf.heard_at < oldest]
        for node in gone:
            del self.leaves[node]
        return [LeafGone(node=node) for node in gone]


MAX_OTHERS = MAX_PUBLICS - 2  # Alive at a time; this node and the learner, which always finds room, fill the digest
MAX_BACK_OFF = 5  # After 2 to 5 failures in a row a public is called again 4 to 32 rounds later, or once it calls

CHANGES = frozenset({"new", "changed", "reissued", "gone", "buried", "equivocation"})
"""Verdicts on records that change something, so their signatures have to be checked."""

LASTING = frozenset({"banned_key", "prefix_taken", "address_refused", "table_full", "subnet_full"})
"""Records refused for these reasons are asked for again only in another order, or after `pardon`."""

Block = tuple[str, int]
TABLE: Block = ("", MAX_OTHERS)


@dataclass(slots=True, kw_only=True)
class Peer:
    """A public. `risen_at` is when its order last rose here, `retry_at` when it may be called again. `addresses` are
    those that this node may call. It is `proven` where it answered this node, or called it from there: before that an
    address is a claim, and may be that of somebody who never heard of this swarm."""

    signed: SignedRecord
    addresses: tuple[Address, ...]
    heard_at: float
    risen_at: float
    proven: bool
    failures: int = 0
    retry_at: float = -math.inf

    def heard(self, heard_at: float) -> None:
        """Note that it called or answered."""
        self.heard_at = max(self.heard_at, heard_at)
        self.failures, self.retry_at = 0, -math.inf

    def failed(self, round_s: float, *, now: float) -> None:
        """Note that a call to it failed. One failure is taken for a lost packet."""
        self.failures = min(self.failures + 1, MAX_BACK_OFF)
        self.retry_at = now + round_s * 2**self.failures if self.failures > 1 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A node that was a public: it was lost, or says that it is none any more. `addresses` are the proven ones."""

    signed: SignedRecord
    died_at: float
    addresses: tuple[Address, ...] = ()

    @property
    def is_lost(self) -> bool:
        return self.signed.record.reachability == "public"


class Table:
    """All publics except this node. `dialable` says if it may call what somebody else named. `lan` is for Tries."""

    def __init__(self, rules: GossipRules, dialable: Callable[[Address], bool], *, lan: bool = True) -> None:
        self._rules = rules
        self._dialable = dialable
        self.by_prefix: dict[bytes, Peer] = {}
        self.dead: dict[bytes, Tombstone] = {}
        self.banned: Bounded[NodeId, None] = Bounded(MAX_BANNED)
        self.unwanted: Bounded[bytes, int] = Bounded(MAX_PUBLICS)
        self.tries = Tries(2 * rules.round_s, rules.silent_rounds * rules.round_s, lan=lan)
        self._pardon_at = -math.inf
        self._blocks: dict[Block, dict[bytes, None]] = {}
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
        """The learner, dead or alive. Its prefix is noted when it is first seen."""
        return self.by_prefix.get(self._learner) or self.dead.get(self._learner) if self._learner else None

    def callable_at(self, signed: SignedRecord) -> tuple[Address, ...]:
        """Return the addresses of a record that this node may call. Only the learner's may be a name, and only with a
        certificate, because a name may lead anywhere."""
        record = signed.record
        named = record.role == "learner"
        return tuple(a for a in record.addresses if (a.fingerprint and named if is_name(a.host) else self._dialable(a)))

    def may_call(self, peer: Peer, *, now: float) -> bool:
        """Return True if a public is proven, or if a host that it claims was not tried in vain lately."""
        return peer.proven or any(self.tries.is_due(address, now=now) for address in peer.addresses)

    def prove(self, node: NodeId, proves: Callable[[Address], bool]) -> None:
        """Note that `node` is where `proves` says, and call it nowhere else."""
        peer = self.find(node)
        if peer is None or peer.proven:
            return
        if (found := next(filter(proves, peer.addresses), None)) is not None:
            self.tries.answered(found)
            peer.addresses, peer.proven = (found,), True

    def judge(self, signed: SignedRecord, heard_at: float, *, is_there: bool = False, now: float) -> str:
        """Return what `admit` is to make of a record if its owner signed it: one of CHANGES, "known", or the reason for
        a refusal. Nothing here is as costly as a signature. If its owner `is_there`, speaking from the address that the
        record names, publics that merely claim to be there give way."""
        if signed.node in self.banned:
            return "banned_key"
        known = self.by_prefix.get(signed.prefix)
        latest = known or self.dead.get(signed.prefix)
        if latest is not None and latest.signed.node != signed.node:
            return "prefix_taken"
        if latest is not None and signed.order <= latest.signed.order:
            if signed.order < latest.signed.order:
                return "old_record"
            # Compare the bodies: anybody can wrap the same body and signature in other bytes.
            return "known" if signed.body == latest.signed.body else "equivocation"
        if signed.record.reachability != "public":
            return "gone" if known is not None else "buried" if latest is not None else "known"
        if known is None and now - heard_at > self._rules.dead_rounds * self._rules.round_s:
            return "zombie"
        if not self.callable_at(signed):
            return "address_refused"
        # The learner always finds room: without it there is no swarm.
        full = self._full_for(signed) if signed.record.role != "learner" else []
        if full and not (is_there and all(map(self._claim_in, full))):
            return "table_full" if TABLE in full else "subnet_full"
        if known is None:
            return "new"
        return "changed" if signed.record.addresses != known.signed.record.addresses else "reissued"

    def admit(self, signed: SignedRecord, heard_at: float, verdict: str, *, now: float) -> list[Effect]:
        """Take in a record of which `judge` has just said `verdict`. `heard_at` is the latest beat as far as the node
        that passed the record on knows. The caller has checked the signature if the verdict is one of CHANGES."""
        if verdict in ("new", "changed") and signed.record.role != "learner":
            for claim in filter(None, map(self._claim_in, self._full_for(signed))):
                self.forget(claim)
        match verdict:
            case "known":
                return []
            case "new":
                self._add(signed, heard_at, now)
                return [Appeared(signed=signed)]
            case "changed" | "reissued":
                self._renew(self.by_prefix[signed.prefix], signed, heard_at, now)
                return []
            case "buried":
                self._lay(signed, now)
                return []
            case "gone":
                self.forget(self.by_prefix[signed.prefix])
                self._lay(signed, now)
                return [Died(node=signed.node, reason=signed.record.reachability)]
            case "equivocation":
                return self._ban(signed)
        if verdict in LASTING:
            self.unwanted[signed.prefix] = signed.order
        return [Rejected(reason=verdict)]

    def pardon(self, *, now: float) -> None:
        """Once in a record's life, ask again for what was refused: there may be room by now."""
        if now >= self._pardon_at:
            self._pardon_at = now + self._rules.life_rounds * self._rules.round_s
            self.unwanted.clear()

    def expire(self, *, now: float, patience: float) -> list[Effect]:
        """Bury publics whose beat or record is too old. `patience` is above 1 while this node itself runs late."""
        rules = self._rules
        oldest_beat = now - patience * rules.dead_rounds * rules.round_s
        oldest_record = now - rules.life_rounds * rules.round_s
        effects: list[Effect] = []
        for peer in [p for p in self if p.heard_at < oldest_beat or p.risen_at < oldest_record]:
            self.forget(peer)
            self._lay(peer.signed, now, peer.addresses if peer.proven else ())
            reason = "silent" if peer.heard_at < oldest_beat else "record expired"
            effects.append(Died(node=peer.signed.node, reason=reason))
        forgotten = now - rules.tombstone_rounds * rules.round_s
        for prefix in [prefix for prefix, stone in self.dead.items() if stone.died_at < forgotten]:
            del self.dead[prefix]
        return effects

    def forget_old(self, *, now: float) -> None:
        """Do for a leaf what `expire` does for a public: hearing of beats once a minute, it cannot declare a death."""
        oldest = now - self._rules.life_rounds * self._rules.round_s
        for peer in [p for p in self if max(p.heard_at, p.risen_at) < oldest]:
            # The learner's last address is better than none.
            if peer.signed.record.role != "learner":
                self.forget(peer)

    def is_suspect(self, peer: Peer, *, now: float) -> bool:
        return now - peer.heard_at > self._rules.suspect_rounds * self._rules.round_s

    def forget(self, peer: Peer) -> None:
        """Drop a live peer without a tombstone, for example because a leaf knows enough others."""
        del self.by_prefix[peer.signed.prefix]
        self._count_blocks(peer.signed, leaves=True)

    # -- transitions -----------------------------------------------------------------------------------------

    def _ban(self, signed: SignedRecord) -> list[Effect]:
        self.banned[signed.node] = None
        if (peer := self.by_prefix.get(signed.prefix)) is not None:
            self.forget(peer)
        self.dead.pop(signed.prefix, None)
        return [Rejected(reason="equivocation"), Died(node=signed.node, reason="equivocated")]

    def _renew(self, peer: Peer, signed: SignedRecord, heard_at: float, now: float) -> None:
        if signed.record.addresses != peer.signed.record.addresses:
            self._count_blocks(peer.signed, leaves=True)
            self._count_blocks(signed)
            peer.failures, peer.retry_at = 0, -math.inf
            peer.addresses, peer.proven = self.callable_at(signed), signed.record.role == "learner"
        peer.signed, peer.risen_at = signed, now
        peer.heard_at = max(peer.heard_at, heard_at)

    def _add(self, signed: SignedRecord, heard_at: float, now: float) -> None:
        self.dead.pop(signed.prefix, None)
        while len(self.by_prefix) + len(self.dead) >= MAX_PUBLICS and self.dead:
            del self.dead[next(iter(self.dead))]
        is_learner = signed.record.role == "learner"
        addresses = self.callable_at(signed)
        self.by_prefix[signed.prefix] = Peer(
            signed=signed, addresses=addresses, heard_at=heard_at, risen_at=now, proven=is_learner
        )
        if is_learner:
            self._learner = signed.prefix
        self._count_blocks(signed)

    def _lay(self, signed: SignedRecord, now: float, addresses: tuple[Address, ...] = ()) -> None:
        # Take it out and put it in again, so that the oldest tombstone stays first.
        self.dead.pop(signed.prefix, None)
        self.dead[signed.prefix] = Tombstone(signed=signed, died_at=now, addresses=addresses)

    def has_room(self, address: Address) -> bool:
        """Return True if a public that proves this address would be taken in."""
        return all(len(self._in(one)) < one[1] or self._claim_in(one) for one in blocks_of((address,)))

    def _full_for(self, signed: SignedRecord) -> list[Block]:
        """Return the blocks that have no room for a record, besides those in which its node is already."""
        blocks = blocks_of(signed.record.addresses)
        return [one for one in blocks if len(self._in(one)) >= one[1] and signed.prefix not in self._in(one)]

    def _claim_in(self, block: Block) -> Peer | None:
        """Return a public in a block that never proved to be there."""
        return next((peer for one in self._in(block) if not (peer := self.by_prefix[one]).proven), None)

    def _in(self, block: Block) -> Mapping[bytes, None]:
        return self._blocks.get(block, {})

    def _count_blocks(self, signed: SignedRecord, *, leaves: bool = False) -> None:
        for block in blocks_of(signed.record.addresses):
            within = self._blocks.setdefault(block, {})
            if leaves:
                within.pop(signed.prefix, None)
            else:
                within[signed.prefix] = None
            if not within:
                del self._blocks[block]


def blocks_of(addresses: Iterable[Address]) -> set[Block]:
    """Return the table, and the /24 or /48 and the host of each address of the open internet, with the publics that
    each may have. Private networks have no limit: no stranger is there, and a laboratory may have many nodes."""
    hosts = {open_host(address.host) for address in addresses} - {""}
    return {TABLE, *((network_of(host), MAX_PER_SUBNET) for host in hosts), *((host, MAX_PER_HOST) for host in hosts)}
