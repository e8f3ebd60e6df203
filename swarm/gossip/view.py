"""What one node knows, and what it tells others of that.

An answer is short: an entry only where our beat is younger by more than an age grows on its way, a record only where
ours is newer. What does not fit goes with the next round.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from swarm.errors import ProtocolError
from swarm.gossip.records import (
    AGE_UNIT_S,
    ENTRY_BYTES,
    GOSSIP_BODY_BYTES,
    HEAD_BYTES,
    PREFIX_BYTES,
    RECORD_BYTES,
    Entry,
    Exchange,
    ExchangeReply,
    GossipRules,
    Owner,
    SignedRecord,
    pack_digest,
    prefix_of,
    unpack_digest,
)
from swarm.gossip.table import LeafLeases, Peer, Table
from swarm.types import NodeId, VersionId

Seen = dict[bytes, tuple[int, float]]  # Order and beat by prefix, as a digest claims them
RECORDS_BYTES = 40 * 1024  # Records of one message: with the digest of 1,000 publics they fit the body's cap
MAX_WANTED = RECORDS_BYTES // 256  # A little less than one message can bring: a record with one address takes 221 bytes
FRAME_BYTES = 64  # What msgpack adds to the fields of an answer
FIELD_BYTES = 3  # The header that msgpack puts before bytes


class View:
    """The node itself, the publics, its leaves, and the newest head."""

    def __init__(self, owner: Owner, rules: GossipRules, table: Table) -> None:
        self.owner = owner
        self.rules = rules
        self.table = table
        self.leases = LeafLeases(rules)
        self.newest: VersionId | None = None
        self.head = b""

    @property
    def own(self) -> SignedRecord:
        return self.owner.signed

    @property
    def is_public(self) -> bool:
        return self.owner.reachability == "public"

    def learner(self) -> SignedRecord | None:
        """Return the learner's newest record, dead or alive: its address is the best that is known."""
        if self.owner.role == "learner":
            return self.own
        known = self.table.learner
        return known.signed if known is not None else None

    def live_learner(self) -> SignedRecord | None:
        """Return the learner's record unless the learner is dead: a dead learner's address is no news for anybody."""
        learner = self.learner()
        return learner if learner is not None and self.record_of(learner.prefix) is learner else None

    def has_newer_head(self, message: Exchange) -> bool:
        return self.newest is not None and (message.newest is None or self.newest > message.newest)

    def has_moved_learner(self, message: Exchange) -> bool:
        """Return True if the learner is in a later life than the caller knows. A mere re-issue does not end a poll."""
        learner = self.live_learner()
        return learner is not None and learner.order >> 16 > message.learner >> 16

    def usable(self, now: float) -> list[Peer]:
        """Return the publics that may be called now."""
        rested = [peer for peer in self.table if peer.retry_at <= now]
        if not self.table.tries.has_waiting(now=now):
            return rested
        return [peer for peer in rested if self.table.may_call(peer, now=now)]

    def reached(self, now: float) -> list[Peer]:
        """Return those of them that are proven, for calls whose failure is not told here."""
        return [peer for peer in self.usable(now) if peer.proven]

    def at_least(self, count: int, now: float) -> list[Peer]:
        """Return the publics that may be called now, filled up to `count` with those whose turn comes next: a newcomer
        that knows one other node must not fall silent because its first calls were lost."""
        usable = self.usable(now)
        if len(usable) >= count:
            return usable
        waiting = [peer for peer in self.table if peer.retry_at > now and self.table.may_call(peer, now=now)]
        return [*usable, *sorted(waiting, key=lambda peer: peer.retry_at)[: count - len(usable)]]

    def some(self, count: int, random: Random, *, now: float) -> list[Peer]:
        """Return up to `count` random publics to call."""
        known = self.at_least(count, now)
        return random.sample(known, min(count, len(known)))

    def home_candidates(self, now: float) -> list[NodeId]:
        """Return the publics to choose homes from. The busy learner counts only if there are too few others."""
        usable = self.usable(now)
        others = [peer.signed.node for peer in usable if peer.signed.record.role != "learner"]
        return others if len(others) >= self.rules.homes else [peer.signed.node for peer in usable]

    def record_of(self, prefix: bytes) -> SignedRecord | None:
        if prefix == self.own.prefix:
            return self.own
        peer = self.table.by_prefix.get(prefix)
        return peer.signed if peer is not None else None

    def ages_of(self, records: Iterable[SignedRecord], now: float) -> list[Entry]:
        """Return entries for records that are passed on. The age of each beat keeps an old one from looking new."""
        entries: list[Entry] = []
        for signed in records:
            if signed.prefix == self.own.prefix:
                entries.append((signed.prefix, signed.order, 0.0))
            elif (peer := self.table.by_prefix.get(signed.prefix)) is not None:
                entries.append((signed.prefix, signed.order, now - peer.heard_at))
        return entries

    # -- messages --------------------------------------------------------------------------------------------

    def push_message(self, records: list[SignedRecord], now: float, *, head: bytes = b"") -> Exchange:
        """Return a message with news. Its answer only corrects what the caller has wrong."""
        digest = pack_digest(self.ages_of(records, now))
        return Exchange(
            digest=digest, records=tuple(one.sealed for one in records), head=head, newest=self.newest, asks=0
        )

    def round_message(self, now: float) -> Exchange:
        """Return a message with every public that this node knows, itself first if it is one."""
        own = [(self.own.prefix, self.own.order, 0.0)] if self.is_public else []
        return Exchange(digest=pack_digest([*own, *_entries(self.table, now)]), newest=self.newest)

    def poll_message(self, *, tells_record: bool, tells_head: bool, hold_s: float) -> Exchange:
        """Return a leaf's question for news."""
        return Exchange(
            records=(self.own.sealed,) if tells_record else (),
            # After a partition this leaf may be the only one that has the head.
            head=self.head if tells_head else b"",
            newest=self.newest,
            learner=self._learner_order(),
            hold_s=hold_s,
            asks=0,
        )

    def refresh_message(self, now: float) -> Exchange:
        """Return a leaf's question for publics beyond those it knows, for at least a few even if it knows enough."""
        room = max(4, self.rules.leaf_publics - len(self.table))
        stalest = sorted(self.table, key=lambda peer: peer.heard_at)[: self.rules.refreshed]
        digest = pack_digest(_entries(stalest, now))
        return Exchange(digest=digest, newest=self.newest, learner=self._learner_order(), asks=room)

    def _learner_order(self) -> int:
        learner = self.learner()
        return learner.order if learner is not None else 0


def _entries(peers: Iterable[Peer], now: float) -> list[Entry]:
    return [(peer.signed.prefix, peer.signed.order, now - peer.heard_at) for peer in peers]


def seen_in(digest: bytes, *, latest: float) -> Seen:
    """Return what a digest claims. An age of 0 counts as heard at `latest`. Raise ProtocolError if it is no digest."""
    return {prefix: (order, latest - age * AGE_UNIT_S) for prefix, order, age in unpack_digest(digest)}


def fitting(records: Iterable[SignedRecord], room: int = RECORDS_BYTES, *, extra: int = 0) -> list[SignedRecord]:
    """Return the first records that fit one message, or `room` bytes if that is less, each with `extra` bytes."""
    taken: list[SignedRecord] = []
    room = min(room, RECORDS_BYTES)
    for signed in records:
        room -= len(signed.sealed) + FIELD_BYTES + extra
        if room < 0:
            break
        taken.append(signed)
    return taken


# -- answering ---------------------------------------------------------------------------------------------------


def answer_to(view: View, caller: NodeId, message: Exchange, *, random: Random, now: float) -> ExchangeReply:
    """Return what `caller` lacks, within the cap of a body."""
    prefix = prefix_of(caller)
    try:
        seen = seen_in(message.digest, latest=now)
    except ProtocolError:
        seen = {}
    polls = message.hold_s > 0
    leaf = view.leases.leaves.get(caller)
    entries, records, unknown = _news_for(view, prefix, message, seen, random=random, now=now)
    wanted = _wanted_of(view, seen, random) if message.asks else []
    if polls and leaf is not None and leaf.signed is None:
        wanted.append(prefix)
    refute = b""
    if (stone := view.table.dead.get(prefix)) is not None and stone.signed.node == caller and stone.is_lost:
        refute = stone.signed.sealed
    used = FRAME_BYTES + RECORD_BYTES + HEAD_BYTES + len(entries) * ENTRY_BYTES + len(wanted) * (PREFIX_BYTES + 2)
    room = GOSSIP_BODY_BYTES - used
    told = fitting(records, room)
    room -= sum(len(signed.sealed) + FIELD_BYTES for signed in told)
    new = fitting((peer.signed for peer in unknown), room, extra=ENTRY_BYTES)
    return ExchangeReply(
        digest=pack_digest([*entries, *view.ages_of(new, now)]),
        records=tuple(signed.sealed for signed in (*told, *new)),
        head=view.head if view.has_newer_head(message) else b"",
        wanted=tuple(wanted),
        refute=refute,
        full=polls and leaf is None,
    )


def _news_for(
    view: View, caller: bytes, message: Exchange, seen: Seen, *, random: Random, now: float
) -> tuple[list[Entry], list[SignedRecord], list[Peer]]:
    """Return younger beats and newer records than the caller has, and up to `asks` publics that it does not know."""
    entries: list[Entry] = []
    records: list[SignedRecord] = []
    unknown: list[Peer] = []
    if message.asks and message.digest and view.is_public and seen.get(view.own.prefix, (-1, 0.0))[0] < view.own.order:
        records.append(view.own)
    younger_s = view.rules.transit_s
    if message.asks:
        unknown = [peer for prefix, peer in view.table.by_prefix.items() if prefix not in seen and prefix != caller]
    for prefix, (order, heard_at) in seen.items():
        if (peer := view.table.by_prefix.get(prefix)) is None:
            continue
        if peer.heard_at - heard_at > younger_s:
            entries.append((prefix, peer.signed.order, now - peer.heard_at))
        if order < peer.signed.order:
            records.append(peer.signed)
    if message.hold_s > 0 and (learner := view.live_learner()) is not None and learner.order > message.learner:
        records.append(learner)
        entries += view.ages_of([learner], now)
    if len(unknown) > message.asks:
        # A leaf gets a random part, without suspects and with the learner first.
        unknown = [peer for peer in unknown if not view.table.is_suspect(peer, now=now)]
        learners = [peer for peer in unknown if peer.signed.record.role == "learner"]
        others = [peer for peer in unknown if peer.signed.record.role != "learner"]
        unknown = [*learners, *random.sample(others, min(message.asks, len(others)))]
    return entries, records, unknown[: message.asks]


def _wanted_of(view: View, seen: Seen, random: Random) -> list[bytes]:
    """Return the prefixes of records that the caller has and this node lacks. If there are too many, pick random ones:
    records that this node would refuse must not hold up the others for ever."""
    wanted: list[bytes] = []
    for prefix, (order, _) in seen.items():
        known = view.table.by_prefix.get(prefix) or view.table.dead.get(prefix)
        if known is not None:
            lacks = order > known.signed.order
        else:
            lacks = prefix != view.own.prefix and order != view.table.unwanted.get(prefix)
        if lacks:
            wanted.append(prefix)
    return wanted if len(wanted) <= MAX_WANTED else random.sample(wanted, MAX_WANTED)
