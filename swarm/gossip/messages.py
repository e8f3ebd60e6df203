"""Bodies of gossip calls (docs/protocol.md), and the digests in them.

A digest is a row of 14-byte entries: 8 bytes of the node id, 4 of its record's order, 2 of the age of its last beat in
tenths of a second. An age is rounded up and only grows on its way.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from swarm.errors import ProtocolError
from swarm.gossip.records import PREFIX_BYTES, RECORD_BYTES
from swarm.gossip.rules import MAX_PUBLICS
from swarm.types import Seconds, VersionId
from swarm.wire import Message

_ENTRY = struct.Struct(f">{PREFIX_BYTES}sIH")
ENTRY_BYTES = _ENTRY.size
AGE_UNIT_S = 0.1
MAX_AGE_S = 65_535 * AGE_UNIT_S

HEAD_BYTES = 1024
"""A signed head; gossip carries it as it is."""

RecordField = Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES)]
DigestBytes = Annotated[bytes, msgspec.Meta(max_length=ENTRY_BYTES * MAX_PUBLICS)]
PrefixField = Annotated[bytes, msgspec.Meta(min_length=PREFIX_BYTES, max_length=PREFIX_BYTES)]
OrderField = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Records = Annotated[tuple[RecordField, ...], msgspec.Meta(max_length=512)]

Entry = tuple[bytes, int, float]
"""Prefix, order, age in seconds."""


class Exchange(Message, frozen=True):
    """From a public: all that it knows, for what it lacks in return. From a leaf: a poll.

    `digest` is empty in a push and in a poll. `newest` is the version that the caller knows of, `learner` the order of
    the learner's record that it knows. `hold_s` above 0 makes it a poll, which is answered at once when there is a
    newer head or the learner has moved, and `asks` is how many publics beyond those of its digest the caller wants.
    """

    digest: DigestBytes = b""
    records: Records = ()
    head: Annotated[bytes, msgspec.Meta(max_length=HEAD_BYTES)] = b""
    newest: VersionId | None = None
    learner: OrderField = 0
    hold_s: Seconds = 0.0
    asks: Annotated[int, msgspec.Meta(ge=0, le=MAX_PUBLICS)] = MAX_PUBLICS


class ExchangeReply(Message, frozen=True):
    """What the caller lacks. `wanted` are records that this node lacks, `refute` is the caller's own record that this
    node holds dead, `full` says that this home has no room for the leaf that polled."""

    digest: DigestBytes = b""
    records: Records = ()
    head: Annotated[bytes, msgspec.Meta(max_length=HEAD_BYTES)] = b""
    wanted: Annotated[tuple[PrefixField, ...], msgspec.Meta(max_length=MAX_PUBLICS)] = ()
    refute: Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES)] = b""
    full: bool = False


def pack_digest(entries: Iterable[Entry]) -> bytes:
    """Entries as they travel; ages rounded up."""
    pack = _ENTRY.pack
    return b"".join(
        [pack(prefix, order, min(65_535, math.ceil(age_s / AGE_UNIT_S))) for prefix, order, age_s in entries]
    )


def unpack_digest(digest: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Prefix, order and age in units of each entry. ProtocolError if it is no row of entries."""
    if len(digest) % ENTRY_BYTES:
        raise ProtocolError(f"a digest of {len(digest)} bytes is no row of {ENTRY_BYTES}-byte entries")
    return _ENTRY.iter_unpack(digest)
