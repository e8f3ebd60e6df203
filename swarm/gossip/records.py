"""A node's own word about itself, signed by it over the exact bytes that travel.

Records of one node are ordered by (generation, sequence). The generation is persisted and rises at every start, the
sequence at every re-issue, so only the owner can replace its record, and a replayed one is older than what is known.
Two records of the same order with different contents are equivocation: the key is banned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from swarm.errors import ProtocolError
from swarm.signing import PublicKeyField, Sealed, SigningKey, node_id_of, swarm_id_of, unseal
from swarm.types import Address, Id, NodeId, Role, Seconds, SwarmId, VersionId
from swarm.wire import Message, decode, encode

RECORD_CONTEXT = "record"

RECORD_BYTES = 1024
"""An ordinary record takes 270 to 340 bytes; one with four long DNS names fits too."""

MAX_ADDRESSES = 4
"""IPv4, IPv6 and two names."""

MAX_SEQUENCE = 65_535
"""Sequence and generation have two bytes each in a digest; after 45 days of re-issues the generation rises."""

PREFIX_BYTES = 8
"""How much of a node id stands for it in a digest: enough that no two of 4,096 nodes meet, by chance or by design."""

Reachability = Literal["leaf", "public", "gone"]
"""Dials out only; proven reachable from outside; has left."""

Rate = Annotated[float, msgspec.Meta(ge=0, le=1e13)]
Counter16 = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]


class Profile(Message, frozen=True):
    """What a node can do and holds. Claims: nothing that matters rests on them unmeasured. 0 is unknown.

    `leaves` is how many leaves have this node as a home.
    """

    held: VersionId | None = None
    engine: Annotated[str, msgspec.Meta(max_length=32)] = ""
    leaves: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    rollouts_per_s: Rate = 0
    uplink_bytes_per_s: Rate = 0
    downlink_bytes_per_s: Rate = 0
    cost_per_hour: Rate = 0


class Record(Message, frozen=True):
    """Who a node is, where it listens, what it is worth. `round_s` is the swarm's pace, by the learner's word alone."""

    key: PublicKeyField
    swarm: Id
    generation: Counter16
    sequence: Counter16
    role: Role
    reachability: Reachability
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    protocol: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    profile: Profile
    round_s: Seconds = 0.0

    @property
    def order(self) -> int:
        """(generation, sequence) as one number of four bytes."""
        return self.generation << 16 | self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRecord:
    """A record whose signature was checked, as it travels, with what is looked up often."""

    record: Record
    sealed: bytes
    body: bytes
    node: NodeId
    prefix: bytes
    order: int


def prefix_of(node: NodeId) -> bytes:
    """The bytes that stand for a node in a digest."""
    return bytes.fromhex(node)[:PREFIX_BYTES]


def sign_record(record: Record, key: SigningKey) -> SignedRecord:
    """`record` by its owner."""
    assert record.key == key.public_bytes
    body = encode(record)
    return _signed(record, key.seal(RECORD_CONTEXT, body), body)


def open_record(sealed: bytes, swarm: SwarmId) -> SignedRecord:
    """The record in `sealed`: ProtocolError unless its own key signed it, for this swarm."""
    body = decode(sealed, Sealed, cap_bytes=RECORD_BYTES).body
    record = decode(body, Record, cap_bytes=RECORD_BYTES)
    # Cheap refusals first: a signature takes 100 times as long to check.
    if record.swarm != swarm:
        raise ProtocolError("this record is of another swarm")
    if (record.role == "learner") != (swarm_id_of(record.key) == swarm):
        raise ProtocolError("only the swarm's own key is its learner")
    if record.reachability == "public" and not record.addresses:
        raise ProtocolError("a public node has an address")
    unseal(RECORD_CONTEXT, sealed, record.key, cap_bytes=RECORD_BYTES)
    return _signed(record, sealed, body)


def _signed(record: Record, sealed: bytes, body: bytes) -> SignedRecord:
    node = node_id_of(record.key)
    return SignedRecord(record=record, sealed=sealed, body=body, node=node, prefix=prefix_of(node), order=record.order)
