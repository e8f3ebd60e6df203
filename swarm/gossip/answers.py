"""What one node tells another: pure functions over what it knows and what it was asked.

An answer is short: entries only where our beat is younger by more than an age gains on its way, records only where
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
    SignedRecord,
    pack_digest,
    prefix_of,
    unpack_digest,
)
from swarm.gossip.table import Peer, Table, View
from swarm.types import NodeId

Seen = dict[bytes, tuple[int, float]]  # Order and beat by prefix, as a digest claims them
RECORDS_BYTES = 40 * 1024  # Records of one message: with the digest of 1,000 publics they fit the body's cap

MAX_WANTED = RECORDS_BYTES // 256
"""As many as one message of records can bring; the shortest record takes about 256 bytes."""

FRAME_BYTES = 64  # What msgpack adds to the fields of an answer
WANTED_BYTES = PREFIX_BYTES + 2
FIELD_BYTES = 3  # With the header that msgpack puts before bytes


def seen_in(digest: bytes, *, latest: float) -> Seen:
    """What a digest claims; `latest` is when an age of 0 is. ProtocolError for what is no digest."""
    return {prefix: (order, latest - age * AGE_UNIT_S) for prefix, order, age in unpack_digest(digest)}


def answer_to(view: View, caller: NodeId, message: Exchange, *, random: Random, now: float) -> ExchangeReply:
    """What `caller` lacks, within the cap of a body."""
    prefix = prefix_of(caller)
    try:
        seen = seen_in(message.digest, latest=now)
    except ProtocolError:
        seen = {}
    entries, records, unknown = _news_for(view, prefix, message, seen, random=random, now=now)
    wanted = _wanted_of(view, seen, random) if message.asks else []
    if message.hold_s > 0 and view.leases.lacks_record(caller):
        wanted.append(prefix)
    refute = _refutation(view.table, caller)
    head = view.head if view.has_newer_head(message) else b""
    used = FRAME_BYTES + RECORD_BYTES + HEAD_BYTES + len(entries) * ENTRY_BYTES + len(wanted) * WANTED_BYTES
    room = GOSSIP_BODY_BYTES - used
    told = fitting(records, room)
    room -= sum(len(signed.sealed) + FIELD_BYTES for signed in told)
    new = fitting((peer.signed for peer in unknown), room, extra=ENTRY_BYTES)
    return ExchangeReply(
        digest=pack_digest([*entries, *view.ages_of(new, now)]),
        records=tuple(signed.sealed for signed in (*told, *new)),
        head=head,
        wanted=tuple(wanted),
        refute=refute,
        full=message.hold_s > 0 and caller not in view.leases.leaves,
    )


def fitting(records: Iterable[SignedRecord], room: int = RECORDS_BYTES, *, extra: int = 0) -> list[SignedRecord]:
    """As many of the records as one message takes, or `room` bytes if that is less, each with `extra` bytes."""
    taken: list[SignedRecord] = []
    room = min(room, RECORDS_BYTES)
    for signed in records:
        room -= len(signed.sealed) + FIELD_BYTES + extra
        if room < 0:
            break
        taken.append(signed)
    return taken


def _news_for(
    view: View, caller: bytes, message: Exchange, seen: Seen, *, random: Random, now: float
) -> tuple[list[Entry], list[SignedRecord], list[Peer]]:
    """Younger beats and newer records of what the caller knows, and up to `asks` publics that it does not."""
    entries: list[Entry] = []
    records: list[SignedRecord] = []
    unknown: list[Peer] = []
    if message.asks and message.digest and view.is_public and seen.get(view.own.prefix, (-1, 0.0))[0] < view.own.order:
        records.append(view.own)
    younger_s = view.rules.transit_s
    for prefix, peer in view.table.by_prefix.items() if message.digest or message.asks else ():
        claimed = seen.get(prefix)
        if claimed is None:
            if prefix != caller:
                unknown.append(peer)
            continue
        order, heard_at = claimed
        if peer.heard_at - heard_at > younger_s:
            entries.append((prefix, peer.signed.order, now - peer.heard_at))
        if order < peer.signed.order:
            records.append(peer.signed)
    if message.hold_s > 0 and (learner := view.live_learner()) is not None and learner.order > message.learner:
        records.append(learner)
        entries += view.ages_of([learner], now)
    return entries, records, _choose(view.table, unknown, message.asks, random, now)


def _wanted_of(view: View, seen: Seen, random: Random) -> list[bytes]:
    """Prefixes of records that the caller has and this node lacks. Some at random where they are many: those that
    this node would refuse must not stand before the others for ever."""
    by_prefix, dead = view.table.by_prefix, view.table.dead
    wanted: list[bytes] = []
    for prefix, (order, _) in seen.items():
        if (peer := by_prefix.get(prefix)) is not None:
            if order > peer.signed.order:
                wanted.append(prefix)
        elif (stone := dead.get(prefix)) is not None:
            if order > stone.signed.order:
                wanted.append(prefix)
        elif prefix != view.own.prefix and order > view.table.unwanted.get(prefix, -1):
            wanted.append(prefix)
    return wanted if len(wanted) <= MAX_WANTED else random.sample(wanted, MAX_WANTED)


def _refutation(table: Table, caller: NodeId) -> bytes:
    stone = table.dead.get(prefix_of(caller))
    if stone is None or stone.signed.node != caller or not stone.is_lost:
        return b""
    return stone.signed.sealed


def _choose(table: Table, unknown: list[Peer], asks: int, random: Random, now: float) -> list[Peer]:
    """A random part for a leaf, without suspects and with the learner first."""
    if len(unknown) <= asks:
        return unknown
    sound = [peer for peer in unknown if not table.is_suspect(peer, now=now)]
    random.shuffle(sound)
    sound.sort(key=lambda peer: peer.signed.record.role != "learner")
    return sound[:asks]
