"""What flows over one node's links: notes, chunk tables and chunks of the versions under way.

Theory of operation. Each version under way has a core (a Courier) and a file of chunks. A peer takes part in a version
once both ends have opened it; each says so with Have or Complete. A link carries notes first, then what the cores give,
the oldest version first, because a delta needs the version before it. A chunk whose digest is the signed one is written
to its file, and only then does its core hear of it (I2). A wrong chunk counts as a fault of its sender.

Tables. A large chunk table reaches everybody for one copy of the learner's uplink: in parts, each through one
forwarder. A part cannot be proven by itself; the head proves the whole. A receiver that ends up with a wrong table
fetches the right one from a public that has it, or from the learner. Then it finds which parts were wrong and blames
their senders. So a lie costs the learner at most what sending the table to everybody would have cost. Small tables go
to everybody directly.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from swarm.broadcast.forest.planner import MAX_CHUNKS
from swarm.broadcast.notes import MAX_BITMAP_BYTES, Complete, Courier, Have, Kind, Note, Send
from swarm.broadcast.store.store import HeldVersion
from swarm.broadcast.version.manifest import HEAD_BYTES, MAX_CHUNK_BYTES, TABLE_BYTES, Span
from swarm.errors import ProtocolError
from swarm.net.stream import Frame, Outgoing, Stream
from swarm.net.wire import encode
from swarm.types import NodeId, VersionId

MIN_PART_BYTES = 16 * 1024
MAX_PARTS = 32  # The parts of a table never fill a link's queue
PART_BYTES = TABLE_BYTES // MAX_PARTS  # Largest part of the largest table

EARLY_BYTES = 8 * 1024 * 1024
"""Room for parts that arrive before their heads: two usual tables, or one of the largest."""

ENTRY_BYTES = 1024  # A part counts this much on top of its bytes, so that there are at most 8,192 parts

DIRECT_BYTES = 64 * 1024
"""If a table takes no more than this for all receivers together, it is sent directly: a hop would only delay it."""


def parts_of(table_bytes: int) -> list[Span]:
    """Cut a table into parts. They follow from its size alone."""
    size = max(MIN_PART_BYTES, -(-table_bytes // MAX_PARTS))
    return [Span(start=at, nbytes=min(size, table_bytes - at)) for at in range(0, table_bytes, size)]


def forwarders_of(parts: int, uplinks: Mapping[NodeId, float]) -> list[NodeId]:
    """Choose the forwarder of each part so that all are done soonest. Uplinks are in bytes/s; an unknown one (0) counts
    as the slowest known."""
    known = [rate for rate in uplinks.values() if rate > 0]
    least = min(known, default=1.0)
    load = dict.fromkeys(uplinks, 0)
    chosen: list[NodeId] = []
    for _ in range(parts):
        forwarder = min(load, key=lambda node: (load[node] + 1) / (uplinks[node] or least))
        load[forwarder] += 1
        chosen.append(forwarder)
    return chosen


class TableParts:
    """The parts of one table that came, and who sent them."""

    def __init__(self, table_bytes: int) -> None:
        self.spans = parts_of(table_bytes)
        self._parts: dict[int, bytes] = {}
        self._senders: dict[int, NodeId] = {}

    def put(self, index: int, data: bytes, sender: NodeId) -> bool:
        """Take a part. Return False if it has the wrong shape. The first to come counts."""
        if index >= len(self.spans) or len(data) != self.spans[index].nbytes:
            return False
        if index not in self._parts:
            self._parts[index], self._senders[index] = data, sender
        return True

    def whole(self) -> bytes | None:
        """Return the table, or None while parts are missing."""
        if len(self._parts) < len(self.spans):
            return None
        return b"".join(self._parts[index] for index in range(len(self.spans)))

    def liars(self, table: bytes) -> list[NodeId]:
        """Return the senders of parts that differ from the right `table`."""
        wrong = [i for i, data in self._parts.items() if data != _cut(table, self.spans[i])]
        return [self._senders[index] for index in wrong]


class EarlyParts:
    """Parts that arrived before their heads and that nothing can prove yet: at most EARLY_BYTES. Beyond that the node
    that sent most loses its oldest part, so that a flood only drives out itself."""

    def __init__(self) -> None:
        self._sent: dict[NodeId, deque[tuple[VersionId, int, bytes]]] = {}
        self._nbytes: dict[NodeId, int] = {}

    def put(self, version: VersionId, index: int, data: bytes, sender: NodeId) -> None:
        """Keep a part of the version that `sender` names."""
        self._sent.setdefault(sender, deque()).append((version, index, data))
        self._nbytes[sender] = self._nbytes.get(sender, 0) + len(data) + ENTRY_BYTES
        while sum(self._nbytes.values()) > EARLY_BYTES:
            most = max(self._nbytes, key=lambda node: self._nbytes[node])
            self._nbytes[most] -= len(self._sent[most].popleft()[2]) + ENTRY_BYTES
            if not self._sent[most]:
                del self._sent[most], self._nbytes[most]

    def take(self, version: VersionId) -> list[tuple[int, bytes, NodeId]]:
        """Return the parts of a version. Forget them and those of older versions."""
        found = [
            (index, data, sender) for sender, parts in self._sent.items() for of, index, data in parts if of == version
        ]
        for sender, parts in list(self._sent.items()):
            later = deque(part for part in parts if part[0] > version)
            if later:
                self._sent[sender] = later
                self._nbytes[sender] = sum(len(data) + ENTRY_BYTES for _, _, data in later)
            else:
                del self._sent[sender], self._nbytes[sender]
        return found


def _cut(data: bytes, span: Span) -> bytes:
    return data[span.start : span.start + span.nbytes]


NOTE, CHUNK, HEAD, TABLE, ROSTER, ROUTES = range(3, 9)
"""Types of frames. Types 1 and 2 are in net/links.py."""

ROSTER_BYTES = 512 * 1024  # 256 members of 2 KiB: four addresses with names of the full length
ROUTES_BYTES = 512 * 1024  # 255 children in each of 16 stripes, at 66 bytes, are 270 KB

CAPS = {
    NOTE: MAX_BITMAP_BYTES + 1024,
    CHUNK: MAX_CHUNK_BYTES,
    HEAD: HEAD_BYTES,
    TABLE: PART_BYTES,
    ROSTER: ROSTER_BYTES,
    ROUTES: ROUTES_BYTES,
}
"""Largest payload of each type. It is checked before a buffer is made."""

MAX_ACTIVE = 4  # Versions under way at once. A node that is further behind catches up another way (catchup.py).
MAX_FAULTS = 3  # Wrong chunks from one link before its node is dropped: one may be a broken disk or memory
MAX_QUEUED = 256  # Announcements and notes that may wait on one link

EARLY_BITMAP_BYTES = MAX_CHUNKS // 8
"""Bytes kept of a bitmap that came before this node opened the version; more than MAX_CHUNKS chunks are rare. A link
keeps them for MAX_ACTIVE versions: 32 KiB, less than its other buffers."""

_NOTES: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)
KINDS = frozenset(int(kind) for kind in Kind)
RATE_S = 1.0
PEAK_DECAY = 0.998  # Per second: the measured uplink is the best second so far, and halves in six minutes


@dataclass(slots=True)
class Transfer:
    """One version under way at this node. `sent_bytes` counts its chunks that went out, with their frames.
    `first_chunk_at` and `completed_at` are moments of the monotonic clock."""

    held: HeldVersion
    courier: Courier
    joined: set[NodeId] = field(default_factory=set)
    first_chunk_at: float | None = None
    completed_at: float | None = None
    sent_bytes: int = 0


class Transfers:
    """All links and all versions under way.

    `is_leaf(node)` says whether a peer only dials out. `on_frame` gets announcements, `on_link` hears of new and lost
    links, `on_complete` of versions that are complete here, `on_fault` of a node that sent wrong chunks too often,
    `on_peer_complete` of a peer that has a whole version, `on_chunk` of every chunk that is here, once or more often.
    """

    def __init__(
        self,
        *,
        is_leaf: Callable[[NodeId], bool],
        on_frame: Callable[[NodeId, Frame, bytes], None],
        on_link: Callable[[NodeId, bool], None],
        on_complete: Callable[[Transfer], None],
        on_fault: Callable[[NodeId], None],
        on_peer_complete: Callable[[NodeId, VersionId], None] = lambda node, version: None,
        on_chunk: Callable[[VersionId, int], None] = lambda version, index: None,
    ) -> None:
        self._is_leaf = is_leaf
        self.on_frame = on_frame
        self._on_link = on_link
        self._on_complete = on_complete
        self._on_fault = on_fault
        self._on_peer_complete = on_peer_complete
        self._on_chunk = on_chunk
        self.links: dict[NodeId, Link] = {}
        self.active: dict[VersionId, Transfer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sent_before = 0
        self._sent_gone = 0
        self._measured_at = self._ticked_at = time.monotonic()
        self.uplink_bytes_per_s = 0.0
        self.rejected: Counter[str] = Counter()

    # -- links -----------------------------------------------------------------------------------------------

    def open_link(self, node: NodeId, stream: Stream) -> Link:
        """Return the owner of a new stream, as Links asks for it."""
        link = self.links[node] = Link(self, node, stream)
        for transfer in self.active.values():
            link.say(transfer.held.head.version, _opening(transfer))
        self._on_link(node, True)
        return link

    def link_closed(self, link: Link) -> None:
        if self.links.get(link.node) is not link:
            return
        del self.links[link.node]
        self._sent_gone += link.stream.sent_bytes
        now = time.monotonic()
        for transfer in self.active.values():
            if link.node in transfer.joined:
                transfer.joined.discard(link.node)
                transfer.courier.leave(link.node, now=now)
        self._on_link(link.node, False)
        self.stir()

    # -- versions --------------------------------------------------------------------------------------------

    def open(self, held: HeldVersion, courier: Courier) -> Transfer:
        """Take part in a version, also with the peers that opened it before."""
        transfer = Transfer(held=held, courier=courier)
        version = held.head.version
        self.active[version] = transfer
        self.active = dict(sorted(self.active.items()))
        for link in self.links.values():
            link.say(version, _opening(transfer))
        for link in self.links.values():
            if (note := link.opened_before(version)) is not None:
                self._hear(link, transfer, note)
        if held.chunks.complete:
            transfer.completed_at = time.monotonic()
        self.stir()
        return transfer

    def close(self, version: VersionId) -> None:
        self.active.pop(version, None)

    def stir(self) -> None:
        """Wake the links that may have something to send, and arm the timer. Call this after any call of a core."""
        for transfer in self.active.values():
            for node in transfer.courier.ready():
                if (link := self.links.get(node)) is not None:
                    link.stream.wake()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None or not self.active:
            return
        due = [at for t in self.active.values() if (at := t.courier.deadline()) is not None]
        if due:
            delay = max(0.005, min(due) - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._measure(now)
        for link in self.links.values():
            link.stream.adapt(max(1e-3, now - self._ticked_at))
        self._ticked_at = now
        for transfer in list(self.active.values()):
            at = transfer.courier.deadline()
            if at is not None and at <= now + 0.005:
                transfer.courier.tick(now=now)
        self.stir()

    def _measure(self, now: float) -> None:
        if now - self._measured_at < RATE_S:
            return
        sent = self.sent_bytes
        rate = (sent - self._sent_before) / (now - self._measured_at)
        self.uplink_bytes_per_s = max(rate, PEAK_DECAY * self.uplink_bytes_per_s)
        self._sent_before, self._measured_at = sent, now

    @property
    def sent_bytes(self) -> int:
        return self._sent_gone + sum(link.stream.sent_bytes for link in self.links.values())

    # -- frames ----------------------------------------------------------------------------------------------

    def hear(self, link: Link, version: VersionId, note: Note) -> None:
        if isinstance(note, Complete) and not note.chunks:
            # The core must not hear of it: it would count on the peer's chunks.
            self._on_peer_complete(link.node, version)
            return
        transfer = self.active.get(version)
        if transfer is not None:
            self._hear(link, transfer, note)
        elif isinstance(note, Have | Complete) and (not self.active or version > max(self.active)):
            link.remember(version, note)

    def _hear(self, link: Link, transfer: Transfer, note: Note) -> None:
        now = time.monotonic()
        if link.node not in transfer.joined:
            if not isinstance(note, Have | Complete):
                return
            transfer.joined.add(link.node)
            transfer.courier.join(link.node, leaf=self._is_leaf(link.node), now=now)
        transfer.courier.heard(link.node, note, now=now)
        if isinstance(note, Complete):
            self._on_peer_complete(link.node, transfer.held.head.version)
        self.stir()

    def take_chunk(self, link: Link, frame: Frame, payload: memoryview, via: NodeId | None) -> None:
        """Prove a chunk, write it to its place and tell the core, even if it is held already: it may be for forwarding.

        A chunk of a version that is not under way here is dropped without blame: the sender could not know.
        """
        transfer = self.active.get(frame.version)
        if transfer is None or link.node not in transfer.joined:
            return
        chunks, index = transfer.held.chunks, frame.index
        if index >= len(chunks.spans) or chunks.spans[index].nbytes != frame.size or frame.kind not in KINDS:
            self.reject(link, "shape")
            return
        if not chunks.has(index) and not chunks.put(index, payload):
            self.reject(link, "digest")
            return
        now = time.monotonic()
        transfer.first_chunk_at = transfer.first_chunk_at or now
        self._on_chunk(frame.version, index)
        transfer.courier.arrived(link.node, index, Kind(frame.kind), via, now=now)
        if transfer.completed_at is None and chunks.complete:
            transfer.completed_at = now
            self._on_complete(transfer)
        self.stir()

    def reject(self, link: Link, reason: str) -> None:
        """Count a fault of a peer: what it sent goes no further."""
        self.rejected[reason] += 1
        link.faults += 1
        if link.faults >= MAX_FAULTS:
            self._on_fault(link.node)


class Link:
    """One stream and the frames that wait for it: the LinkEnd of Transfers."""

    def __init__(self, transfers: Transfers, node: NodeId, stream: Stream) -> None:
        self._transfers = transfers
        self.node = node
        self.stream = stream
        self.faults = 0
        self._early: dict[VersionId, Have | Complete] = {}
        self._queue: deque[Outgoing] = deque()
        self._scratch = memoryview(bytearray(0))

    def say(self, version: VersionId, note: Note) -> None:
        self.send(NOTE, version, encode(note))

    def send(self, type_: int, version: VersionId, payload: bytes, *, kind: Kind = Kind.COPY, index: int = 0) -> None:
        """Queue a frame ahead of all chunks. If MAX_QUEUED are already waiting, close the link."""
        if len(self._queue) >= MAX_QUEUED:
            # Not at once: a caller that sends to all links is still going through them.
            full = ProtocolError("the link takes no frames")
            asyncio.get_running_loop().call_soon(self.stream.close, full)
            return
        self._queue.append(Outgoing(Frame(type_, len(payload), version, int(kind), index).pack(), payload))
        self.stream.wake()

    def remember(self, version: VersionId, note: Have | Complete) -> None:
        """Remember that the peer has opened a version, in case this node opens it later."""
        self._early[version] = Have(bitmap=note.bitmap[:EARLY_BITMAP_BYTES]) if isinstance(note, Have) else note
        while len(self._early) > MAX_ACTIVE:
            del self._early[min(self._early)]

    def opened_before(self, version: VersionId) -> Have | Complete | None:
        """Return what the peer said it holds of a version that this node opens now. Forget that and older versions."""
        note = self._early.get(version)
        self._early = {later: early for later, early in self._early.items() if later > version}
        return note

    # -- LinkEnd ---------------------------------------------------------------------------------------------

    def pull(self) -> Outgoing | None:
        if self._queue:
            return self._queue.popleft()
        now = time.monotonic()
        for version, transfer in self._transfers.active.items():
            if self.node not in transfer.joined:
                continue
            found = transfer.courier.next_for(self.node, now=now)
            while isinstance(found, Send) and not transfer.held.chunks.has(found.index):
                # This chunk turned out damaged on disk and is being fetched again. Peers that lack it will ask.
                transfer.courier.sent(self.node, found, now=now)
                found = transfer.courier.next_for(self.node, now=now)
            if isinstance(found, Send):
                return self._chunk(version, transfer, found)
            if found is not None:
                payload = encode(found)
                return Outgoing(Frame(NOTE, len(payload), version).pack(), payload)
        return None

    def place(self, frame: Frame) -> memoryview:
        if frame.size > CAPS.get(frame.type, 0):
            raise ProtocolError(f"a frame of type {frame.type} has no {frame.size} bytes")
        if frame.type != CHUNK:
            return memoryview(bytearray(frame.size))
        if len(self._scratch) < frame.size:
            self._scratch = memoryview(bytearray(frame.size))
        return self._scratch[: frame.size]

    def received(self, frame: Frame, payload: memoryview) -> None:
        if frame.type == NOTE:
            self._transfers.hear(self, frame.version, read_note(payload))
        elif frame.type == CHUNK:
            self._transfers.take_chunk(self, frame, payload, self._named(frame.via))
        elif frame.type in CAPS:
            self._transfers.on_frame(self.node, frame, bytes(payload))
        else:
            raise ProtocolError(f"a frame of type {frame.type} may not come here")

    def closed(self, error: Exception | None) -> None:
        self._transfers.link_closed(self)

    # -- chunks ----------------------------------------------------------------------------------------------

    def _chunk(self, version: VersionId, transfer: Transfer, send: Send) -> Outgoing:
        payload = transfer.held.chunks.chunk(send.index)
        via = bytes.fromhex(send.via)[:8] if send.via is not None else b"\0" * 8
        header = Frame(CHUNK, len(payload), version, int(send.kind), send.index, via).pack()

        def sent() -> None:
            transfer.sent_bytes += len(header) + len(payload)
            transfer.courier.sent(self.node, send, now=time.monotonic())
            self._transfers.stir()

        return Outgoing(header, payload, sent)

    def _named(self, via: bytes) -> NodeId | None:
        prefix = via.hex()
        return next((node for node in self._transfers.links if node.startswith(prefix)), None) if any(via) else None


def read_note(data: memoryview) -> Note:
    """Decode a note whose size is checked already. Raise ProtocolError for anything else. Thousands come a second."""
    try:
        return _NOTES.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not a note: {error}") from error


def _opening(transfer: Transfer) -> Note:
    chunks = transfer.held.chunks
    return Complete() if chunks.complete else Have(bitmap=chunks.have())
