"""What nodes tell one another about the chunks of one version, and what every core of a transfer offers its shell.

The cores never see payload: they speak of (peer, index). A link is asked for its next frame only when it can take one
(late binding), so that nothing waits in a socket's buffer that could still be decided differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Protocol

import msgspec

from swarm.types import Address, NodeId
from swarm.wire import Message

MAX_INDICES = 64  # In one note: the most chunks that a receiver asks for at a time
MAX_BITMAP_BYTES = 512 * 1024  # One bit for each of the 4,000,000 chunks that a table may have

Index = Annotated[int, msgspec.Meta(ge=0, le=4_000_000)]
Indices = Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_INDICES)]
Small = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Node = Annotated[NodeId, msgspec.Meta(min_length=1, max_length=64)]

MAX_MEMBERS = 256
"""A roster names the nodes that one node may be linked with: 32 in a mesh, parents and children in a forest."""


class NoteKind(IntEnum):
    """What the receiver of a chunk has to do with it besides keeping it."""

    COPY = 0
    """Nothing."""
    FRESH = 1
    """Forward it: to all links of a mesh, or to the children in the chunk's tree."""
    FORWARD = 2
    """Pass it to the other leaves: it comes from a leaf that cannot reach them."""


@dataclass(slots=True)
class Send:
    """One chunk for one link. `via` names the public that has to forward a leaf's fresh chunk to the other leaves.

    This is not frozen, nor is Frame: thousands are made a second, and that would take three times as long.
    """

    index: int
    kind: NoteKind
    via: NodeId | None = None


class Credit(Message, frozen=True, tag=1):
    """A forwarder can take `copies` more fresh chunks, and as a public `forwards` more to forward. It has sent the
    chunks `copied` to every live child, and passed on `forwarded`. `epoch` is the number of recalls that it has heard:
    credit of an older epoch is void. As separate notes these starved one another on a busy link."""

    copies: Small
    forwards: Small
    epoch: Small
    copied: Indices = ()
    forwarded: Indices = ()


class Recall(Message, frozen=True, tag=3):
    """The seeder deals these chunks to another node: drop what is queued of them. All credit is void."""

    indices: Indices
    epoch: Small


class Have(Message, frozen=True, tag=4):
    """What the sender holds: bit i of byte i // 8 is chunk i."""

    bitmap: Annotated[bytes, msgspec.Meta(max_length=MAX_BITMAP_BYTES)]


class Complete(Message, frozen=True, tag=5):
    """The sender holds the whole version. With `chunks` False only the learner is told: it counts on none of the
    sender's chunks."""

    chunks: bool = True


class Want(Message, frozen=True, tag=6):
    """Send me copies of these, if you have them."""

    indices: Indices


class AllDealt(Message, frozen=True, tag=7):
    """The seeder has dealt everything and nothing is outstanding. Receivers now ask for what they still lack."""


class Behind(Message, frozen=True, tag=8):
    """For the learner: these stripes fall behind the others, although their parents are linked."""

    stripes: Indices


Note = Credit | Recall | Have | Complete | Want | AllDealt | Behind


class Courier(Protocol):
    """One node's part in the transfer of one version. Pure: time and randomness are arguments.

    The shell calls `next_for` when a link can take a frame, and `sent` once it has taken all of it. It calls `arrived`
    only for chunks whose digest matched (I2). After any other call it drains `ready`, the links that may have something
    to send now, and arms a timer for `deadline`. Whatever a peer sends is legal input.
    """

    complete: bool

    def join(self, peer: NodeId, *, leaf: bool, now: float) -> None:
        """Add the link to `peer`, which is up. Two leaves have no link."""

    def leave(self, peer: NodeId, *, now: float) -> None:
        """Drop the link to `peer`, which is down."""

    def arrived(self, peer: NodeId, index: int, kind: NoteKind, via: NodeId | None, *, now: float) -> None:
        """Take a chunk that `peer` sent, now stored and proven. `index` may have been held already."""

    def heard(self, peer: NodeId, note: Note, *, now: float) -> None:
        """Take what `peer` said."""

    def next_for(self, peer: NodeId, *, now: float) -> Note | Send | None:
        """Return what the link to `peer` carries next, or None."""

    def sent(self, peer: NodeId, send: Send, *, now: float) -> None:
        """Note that the link has taken all of `send`, which `next_for` gave."""

    def ready(self) -> list[NodeId]:
        """Return the links that may have something to send since the last call, in a fixed order."""

    def deadline(self) -> float | None:
        """Return when `tick` wants to be called."""

    def tick(self, *, now: float) -> None:
        """Do what is due."""


def has_bit(bitmap: bytes | bytearray, index: int) -> bool:
    """Return True if chunk `index` is in a Have's bitmap, which may be too short."""
    return index >> 3 < len(bitmap) and bool(bitmap[index >> 3] >> (index & 7) & 1)


def set_bit(bitmap: bytearray, index: int) -> None:
    bitmap[index >> 3] |= 1 << (index & 7)


ADDRESSES = 4  # Addresses of one member: IPv4 and IPv6, inside and outside
MAX_STRIPES = 64  # Four times as many as the planner makes


Nodes = Annotated[tuple[Node, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
NO_NODE = NodeId("")  # As a parent: the learner, or none


class Member(Message, frozen=True):
    """One receiver. Without addresses it is a leaf, which dials and cannot be dialled."""

    node: Node
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=ADDRESSES)] = ()

    @property
    def is_leaf(self) -> bool:
        return not self.addresses


class Roster(Message, frozen=True):
    """The receivers that a node should be linked with, itself among them."""

    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Routing(Message, frozen=True):
    """One node's part in the trees of a version: for each stripe its parent, or NO_NODE, and its children; and the pace
    planned for everybody, 0 if unknown."""

    parents: Annotated[tuple[Annotated[NodeId, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=MAX_STRIPES)]
    children: Annotated[tuple[Nodes, ...], msgspec.Meta(max_length=MAX_STRIPES)]
    chunks_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]

    def parent_of(self, index: int) -> NodeId:
        """Return who sends part `index` of the table."""
        return self.parents[index % len(self.parents)] if self.parents else NO_NODE

    def children_of(self, index: int) -> Nodes:
        """Return to whom part `index` of the table goes on."""
        return self.children[index % len(self.children)] if self.children else ()
