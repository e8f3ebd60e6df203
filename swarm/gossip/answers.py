"""What one node tells another: pure functions over a table and a digest.

An answer is short: entries only where our beat is younger by more than an age gains on its way, records only where
ours is newer. What does not fit goes with the next round.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from swarm.gossip.messages import AGE_UNIT_S, Entry, Exchange, unpack_digest
from swarm.gossip.records import SignedRecord
from swarm.gossip.rules import GossipRules
from swarm.gossip.table import Peer, Table

Seen = dict[bytes, tuple[int, float]]
"""Order and beat by prefix, as a digest claims them."""

RECORDS_BYTES = 40 * 1024
"""Records of one message: with the digest of 1,000 publics they fit the body's cap."""


def seen_in(digest: bytes, *, now: float) -> Seen:
    """What a caller knows. ProtocolError for what is no digest."""
    return {prefix: (order, now - age * AGE_UNIT_S) for prefix, order, age in unpack_digest(digest)}


def wanted_of(table: Table, own: bytes, seen: Seen) -> list[bytes]:
    """Prefixes of records that the caller has and this table lacks."""
    by_prefix, dead = table.by_prefix, table.dead
    wanted: list[bytes] = []
    for prefix, (order, _) in seen.items():
        if (peer := by_prefix.get(prefix)) is not None:
            if order > peer.signed.order:
                wanted.append(prefix)
        elif (stone := dead.get(prefix)) is not None:
            if order > stone.signed.order:
                wanted.append(prefix)
        elif prefix != own:
            wanted.append(prefix)
    return wanted


def news_for(
    table: Table, caller: bytes, message: Exchange, seen: Seen, *, rules: GossipRules, random: Random, now: float
) -> tuple[list[Entry], list[SignedRecord]]:
    """Younger beats and newer records of what the caller knows, and up to `asks` publics that it does not."""
    entries: list[Entry] = []
    records: list[SignedRecord] = []
    unknown: list[Peer] = []
    younger_s = rules.transit_s
    for prefix, peer in table.by_prefix.items():
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
    for peer in _choose(table, unknown, message.asks, random, now):
        entries.append((peer.signed.prefix, peer.signed.order, now - peer.heard_at))
        records.append(peer.signed)
    return entries, records


def fitting(records: Iterable[SignedRecord]) -> tuple[bytes, ...]:
    """As many of the records, as they travel, as one message takes."""
    taken: list[bytes] = []
    room = RECORDS_BYTES
    for signed in records:
        room -= len(signed.sealed)
        if room < 0:
            break
        taken.append(signed.sealed)
    return tuple(taken)


def _choose(table: Table, unknown: list[Peer], asks: int, random: Random, now: float) -> list[Peer]:
    """A random part for a leaf, without suspects and with the learner first."""
    if len(unknown) <= asks:
        return unknown
    sound = [peer for peer in unknown if not table.is_suspect(peer, now=now)]
    random.shuffle(sound)
    sound.sort(key=lambda peer: peer.signed.record.role != "learner")
    return sound[:asks]
