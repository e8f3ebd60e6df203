"""The plain data of membership: its constants, signed records, the bodies of calls, and the core's effects.

All durations are multiples of the round, so one number sets the pace. The learner chooses `round_s`, and joining nodes
take it from its hello, because nodes with different paces would believe one another dead.

A record is what a node says about itself, signed over the exact bytes that travel. Records of one node are ordered by
(generation, sequence). The generation is persisted and rises at every start, the sequence at every renewal. So only the
owner can replace its record, and a replayed record is older than the known one. Two records of the same order with
different contents are equivocation: the key is banned.

A digest is a row of 14-byte entries: 8 bytes of the node id, 4 of its record's order, 2 of the age of its last beat in
tenths of a second. An age is rounded up and only grows on its way.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from swarm.errors import ProtocolError
from swarm.net.signing import PublicKeyField, Sealed, SigningKey, node_id_of, swarm_id_of, unseal
from swarm.types import Address, Id, NodeId, Role, Seconds, SwarmId, VersionId
from swarm.wire import CONTROL_BODY_BYTES, Message, decode, encode

GOSSIP_BODY_BYTES = 64 * 1024  # Largest body: the digest of the largest table (57,344 bytes) and some records
MAX_PUBLICS = 4096  # Publics that a node knows, dead ones included: their digest fits a body, their records take 1.5 MB
MAX_PER_SUBNET = 64  # Publics of one /24 (IPv4) or /48 (IPv6): one cheap block of addresses must not fill the table
MAX_PER_HOST = 8  # Publics of one address: a machine runs few, and a record may name a stranger's
MAX_LEAVES = 1024  # Per home: 1,024 held polls are 110 requests a second at the default pace, a quarter of a core

MAX_BANNED = 1024  # Keys that equivocated; the oldest is forgotten first. Their owner can make new keys anyway.

assert GOSSIP_BODY_BYTES <= CONTROL_BODY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipRules:
    """Times in seconds. Only `round_s` is ever set; docs/membership.md explains the other figures."""

    round_s: Seconds = 2.0
    jitter: float = 0.2  # Share by which every period varies, so that nodes started together drift apart
    fanout: int = 2  # Peers called each round; with one, beats at 30 % loss come too near the age of a death
    partners: int = 8  # A public keeps calling the same eight: on an open connection a call takes a fifth of the bytes
    partner_rounds: int = 8  # One of them is replaced every 16 s
    push_fanout: int = 4  # Peers that get news at once: with 3 the last leaf of 1,000 hears a second later

    suspect_rounds: int = 8
    dead_rounds: int = 20  # Dead when the beat is 40 s old, of which a stall of 5 s and 30 % loss make at most 18
    reissue_rounds: int = 30  # A record is renewed every 60 s,
    life_rounds: int = 90  # and void after 180 s without that, whatever others claim of its beats
    tombstone_rounds: int = 1800  # For an hour no older record of a dead node comes back, and partitions can heal

    bootstrap_rounds: int = 30  # A bootstrap is called every 60 s
    silent_rounds: int = 1800  # Where no node has ever answered this one, it calls once an hour in the end
    dead_try_rounds: int = 15  # and a dead node every 30 s, both only to heal partitions
    greeters: int = 8  # Publics that call a bootstrap in each period, however many there are: 500 would cost it 75 KB/s

    homes: int = 3
    hold_rounds: float = 4.0
    """A leaf has three polls held open for 8 s each. At 10 % loss each way, all three miss a head for one leaf in 60,
    which then asks again within 10 s. With four polls of 10 s the last leaf of 1,000 would hear after 3 s, not 7, for
    570 bytes a second instead of 490."""

    lease_rounds: int = 18  # A leaf is gone 36 s after its last poll: three lost in a row, at most 12 s each
    leaf_publics: int = 32  # Publics that a leaf knows: three homes and ten times as many to choose from
    refresh_rounds: int = 30  # Every 60 s it asks a random public for others, so that no set of homes can isolate it
    scarce_rounds: int = 5  # Every 10 s while it knows too few to fill its homes, or could reach none
    refreshed: int = 12  # Its stalest publics, which it then asks about: each has its turn within a record's life

    @property
    def transit_s(self) -> float:
        """Added to the ages in a request, whose time on the way is unknown. Answers add their round trip."""
        return 0.5 * self.round_s

    @property
    def push_delay_s(self) -> float:
        """Changes within this time are pushed on together."""
        return 0.05 * self.round_s

    @property
    def hold_s(self) -> float:
        """How long a poll is held on average."""
        return self.hold_rounds * self.round_s

    @property
    def longest_hold_s(self) -> float:
        return (1 + self.jitter) * self.hold_s


RECORD_CONTEXT = "record"
RECORD_BYTES = 1024  # An ordinary record takes 170 to 280 bytes; one with four long DNS names fits too
MAX_ADDRESSES = 4  # IPv4, IPv6 and two names

MAX_SEQUENCE = 65_535  # A digest has two bytes each for sequence and generation; after 45 days the generation rises
PREFIX_BYTES = 8  # Of a node's id in a digest: no two of 4,096 nodes share them, by chance or by design
Reachability = Literal["leaf", "public", "gone"]  # Only dials out; proven reachable from outside; has left

Counter16 = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]


class Record(Message, frozen=True):
    """Who a node is and where it listens. It claims to hold the version `held`, and that `leaves` have it as a home;
    nothing important relies on these claims. `round_s` is the swarm's pace; only the learner's counts."""

    key: PublicKeyField
    swarm: Id
    generation: Counter16
    sequence: Counter16
    role: Role
    reachability: Reachability
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    held: VersionId | None = None
    leaves: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    round_s: Seconds = 0.0

    @property
    def order(self) -> int:
        """(generation, sequence) as one number of four bytes."""
        return self.generation << 16 | self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """A record with its bytes as they travel and what is looked up often."""

    record: Record
    sealed: bytes
    body: bytes
    node: NodeId
    prefix: bytes
    order: int


def prefix_of(node: NodeId) -> bytes:
    """Return the bytes that stand for a node in a digest."""
    return bytes.fromhex(node)[:PREFIX_BYTES]


def sign_record(record: Record, key: SigningKey) -> SignedRecord:
    """Sign `record` with its owner's key."""
    assert record.key == key.public_bytes
    body = encode(record)
    return _signed(record, key.seal(RECORD_CONTEXT, body), body)


def read_record(sealed: bytes, swarm: SwarmId) -> SignedRecord:
    """Read the record in `sealed`, but leave its signature, which takes 15 times as long to check. Raise ProtocolError
    if it is no record of this swarm."""
    body = decode(sealed, Sealed, cap_bytes=RECORD_BYTES).body
    record = decode(body, Record, cap_bytes=RECORD_BYTES)
    if record.swarm != swarm:
        raise ProtocolError("this record is of another swarm")
    if (record.role == "learner") != (swarm_id_of(record.key) == swarm):
        raise ProtocolError("only the swarm's own key is its learner")
    if record.reachability == "public" and not record.addresses:
        raise ProtocolError("a public node has an address")
    return _signed(record, sealed, body)


def open_record(sealed: bytes, swarm: SwarmId) -> SignedRecord:
    """Read a record whose signature counts. Raise ProtocolError unless its own key signed it, for this swarm."""
    signed = read_record(sealed, swarm)
    unseal(RECORD_CONTEXT, sealed, signed.record.key, cap_bytes=RECORD_BYTES)
    return signed


def _signed(record: Record, sealed: bytes, body: bytes) -> SignedRecord:
    node = node_id_of(record.key)
    return SignedRecord(record=record, sealed=sealed, body=body, node=node, prefix=prefix_of(node), order=record.order)


_ENTRY = struct.Struct(f">{PREFIX_BYTES}sIH")
ENTRY_BYTES = _ENTRY.size
AGE_UNIT_S = 0.1
HEAD_BYTES = 1024  # A signed head, which gossip passes on unchanged

SealedRecord = Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES)]
SealedRecords = Annotated[tuple[SealedRecord, ...], msgspec.Meta(max_length=512)]
SealedHead = Annotated[bytes, msgspec.Meta(max_length=HEAD_BYTES)]
DigestBytes = Annotated[bytes, msgspec.Meta(max_length=ENTRY_BYTES * MAX_PUBLICS)]
Prefix = Annotated[bytes, msgspec.Meta(min_length=PREFIX_BYTES, max_length=PREFIX_BYTES)]

Entry = tuple[bytes, int, float]  # Prefix, order, age in seconds


class Exchange(Message, frozen=True):
    """A round's digest, a push, or a leaf's poll.

    `digest` is empty in a poll. `newest` is the newest version that the caller knows, `learner` the order of the
    learner's record that it knows. A `hold_s` above 0 makes it a poll: it is answered once there is a newer head or the
    learner has moved. `asks` is how many publics the caller wants besides those in its digest.
    """

    digest: DigestBytes = b""
    records: SealedRecords = ()
    head: SealedHead = b""
    newest: VersionId | None = None
    learner: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    hold_s: Seconds = 0.0
    asks: Annotated[int, msgspec.Meta(ge=0, le=MAX_PUBLICS)] = MAX_PUBLICS


class ExchangeReply(Message, frozen=True):
    """What the caller lacks. This node lacks the records `wanted`. `refute` is the caller's own record if this node
    believes it dead. `full` means that this home has no room for the leaf that polled."""

    digest: DigestBytes = b""
    records: SealedRecords = ()
    head: SealedHead = b""
    wanted: Annotated[tuple[Prefix, ...], msgspec.Meta(max_length=MAX_PUBLICS)] = ()
    refute: SealedRecord = b""
    full: bool = False


def pack_digest(entries: Iterable[Entry]) -> bytes:
    """Pack entries as they travel, with ages rounded up."""
    return b"".join(
        [_ENTRY.pack(prefix, order, min(65_535, math.ceil(s / AGE_UNIT_S))) for prefix, order, s in entries]
    )


def unpack_digest(digest: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Return prefix, order and age in AGE_UNIT_S of each entry. Raise ProtocolError if the length does not fit."""
    if len(digest) % ENTRY_BYTES:
        raise ProtocolError(f"a digest of {len(digest)} bytes is no row of {ENTRY_BYTES}-byte entries")
    return _ENTRY.iter_unpack(digest)


class Owner:
    """Signs and numbers the records of one key. `generation` must be higher than in every former life. A learner
    publishes under `incarnation`: generation - 1, or the incarnation of the run that it resumes."""

    def __init__(
        self,
        key: SigningKey,
        swarm: SwarmId,
        role: Role,
        *,
        generation: int,
        addresses: tuple[Address, ...],
        round_s: float = 0.0,
        incarnation: int | None = None,
    ) -> None:
        self._key = key
        self._swarm = swarm
        self.role = role
        self._generation = generation
        self.incarnation = generation - 1 if incarnation is None else incarnation
        self._sequence = -1
        self._round_s = round_s
        self.addresses = addresses
        # Everybody dials the learner: it needs no proof that it can be reached.
        self.reachability: Reachability = "public" if role == "learner" else "leaf"
        self.held: VersionId | None = None
        self.leaves = 0
        self.issue()

    def issue(self) -> list[Effect]:
        """Issue a new record of the present state."""
        effects: list[Effect] = []
        self._sequence += 1
        if self._sequence > MAX_SEQUENCE:
            effects += self._raise_generation(self._generation + 1)
        record = Record(
            key=self._key.public_bytes,
            swarm=self._swarm,
            generation=self._generation,
            sequence=self._sequence,
            role=self.role,
            reachability=self.reachability,
            addresses=self.addresses,
            held=self.held,
            leaves=self.leaves,
            round_s=self._round_s,
        )
        self.signed = sign_record(record, self._key)
        return effects

    def refute(self, claimed: SignedRecord) -> list[Effect]:
        """Go past `claimed`, a record by our own key, not older than ours, that others believe dead, or that this life
        never issued. In the second case the state directory was restored from a copy. The generation then has to rise
        past the former life's, which may have issued other records too."""
        if claimed.body == self.signed.body:
            return self.issue()
        return self._raise_generation(claimed.record.generation + 1) + self.issue()

    def outlive(self, version: VersionId) -> list[Effect]:
        """Go past `version`, which this life cannot serve: another life that the disk forgot has published it, or its
        weights cannot be made again."""
        if self.role != "learner" or version.incarnation < self.incarnation:
            return []
        return self._raise_generation(max(version.incarnation + 2, self._generation + 1)) + self.issue()

    def _raise_generation(self, generation: int) -> list[Effect]:
        # With its numbers used up a key cannot refute any more. Its owner has to make a new one.
        self._generation = min(generation, MAX_SEQUENCE)
        self.incarnation = self._generation - 1
        self._sequence = 0
        return [GenerationRaised(generation=self._generation)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Post:
    """Post `message` to `node`, and hand this call back once, with the answer or because it failed."""

    node: NodeId
    address: Address
    message: Exchange
    timeout_s: float
    sent_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Greet:
    """Say hello to a bootstrap and pass its record in, to find a first node or to look across a partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Look again at every poll that is held open: a newer version exists, or the learner has moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Appeared:
    """A public appeared that was unknown or dead."""

    signed: SignedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A public died: its beat or record is too old, or it has left."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafGone:
    """A leaf has not polled this home for the length of its lease."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRaised:
    """Persist the generation before anything else is sent."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubled:
    """Another process signs records with this node's key, now: stop, instead of going past them for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Count an illegal input from a peer."""

    reason: str


Effect = Post | Greet | Wake | Appeared | Died | LeafGone | GenerationRaised | Doubled | Rejected
