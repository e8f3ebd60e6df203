"""What flows over one node's links: notes, chunk tables and chunks of the versions under way.

Theory of operation. Each version under way has a file of chunks, and a core (a Courier) for each of its segments. A
peer takes part in a segment once both ends have opened it; each says so with Have or Complete. A link carries notes
first, then what the cores give, the oldest version and its first segment first, because a delta needs the version
before it. A chunk whose digest is the signed one is written to its file, and only then does its core hear of it (I2). A
wrong chunk counts as a fault of its sender.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from swarm.broadcast.forest.planner import MAX_CHUNKS
from swarm.broadcast.frames import CAPS, FrameType
from swarm.broadcast.notes import Complete, Courier, Have, Note, NoteKind, Routing, Send
from swarm.broadcast.store.store import Held
from swarm.broadcast.uplinks import FILLER_BYTES, PROBE_BYTES, PROBE_S
from swarm.broadcast.version.manifest import MAX_SEGMENTS
from swarm.errors import ProtocolError
from swarm.net.links import NO_VERSION
from swarm.net.stream import Frame, Outgoing, Stream
from swarm.types import NodeId, VersionId
from swarm.wire import encode

FILLER_FRAME = Frame(FrameType.FILLER, FILLER_BYTES, NO_VERSION).pack()
FILLER_PAYLOAD = bytes(FILLER_BYTES)

MAX_ACTIVE = 4  # Versions under way at once. A node that is further behind catches up (receiver/catchup.py).
MAX_FAULTS = 3  # Wrong chunks from one link before its node is dropped: one may be a broken disk or memory
MAX_QUEUED = 256  # Announcements and notes that may wait on one link

EARLY_BITMAP_BYTES = MAX_CHUNKS // 8
"""Bytes kept of a bitmap that came before this node opened the version; more than MAX_CHUNKS chunks are rare. A link
keeps MAX_EARLY of them: 256 KiB, no more than its other buffers."""

MAX_EARLY = MAX_SEGMENTS

_NOTES: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)
KINDS = frozenset(int(kind) for kind in NoteKind)
RATE_S = 1.0
LINK_S = 10.0  # A version takes a link for a moment of each step: its rate is a mean over some of them
PEAK_DECAY = 0.998  # Per second: the measured uplink is the best second so far, and halves in six minutes


@dataclass(slots=True)
class Part:
    """One segment under way: the version's `chunks`, among which its own are counted from 0, and who takes part."""

    chunks: range
    courier: Courier
    joined: set[NodeId] = field(default_factory=set)


@dataclass(slots=True)
class Transfer:
    """One version under way at this node, in `parts`: those of its segments that are open. `sent_bytes` counts its
    chunks that went out, with their frames. `first_chunk_at` and `completed_at` are moments of the monotonic clock."""

    held: Held
    parts: list[Part] = field(default_factory=list)
    first_chunk_at: float | None = None
    completed_at: float | None = None
    sent_bytes: int = 0

    def opening(self, part: Part) -> Note:
        """Return what a peer is told when both take part in a segment."""
        chunks = self.held.chunks
        return Complete() if chunks.has_all(part.chunks) else Have(bitmap=chunks.have(part.chunks))


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
        for version, transfer in self.active.items():
            for segment, part in enumerate(transfer.parts):
                link.say(version, transfer.opening(part), segment)
        self._on_link(node, True)
        return link

    def link_closed(self, link: Link) -> None:
        if self.links.get(link.node) is not link:
            return
        del self.links[link.node]
        self._sent_gone += link.stream.sent_bytes
        now = time.monotonic()
        for part in self._parts():
            if link.node in part.joined:
                part.joined.discard(link.node)
                part.courier.leave(link.node, now=now)
        self._on_link(link.node, False)
        self.stir()

    # -- versions --------------------------------------------------------------------------------------------

    def open(self, held: Held, courier: Callable[[int, bytes], Courier]) -> Transfer:
        """Take part in all segments of a version that `held` has, also with the peers that opened them before. Those
        that are open go on. `courier` makes the core of a segment of so many chunks, of which some may be held."""
        transfer = self.active.setdefault(held.version, Transfer(held))
        transfer.held = held
        self.active = dict(sorted(self.active.items()))
        for segment in range(len(transfer.parts), len(held.chunks.segments)):
            chunks = held.chunks.segments[segment]
            part = Part(chunks, courier(len(chunks), held.chunks.have(chunks)))
            transfer.parts.append(part)
            self._join_others(transfer, segment, part)
        if held.chunks.complete:
            transfer.completed_at = transfer.completed_at or time.monotonic()
        self.stir()
        return transfer

    def _join_others(self, transfer: Transfer, segment: int, part: Part) -> None:
        version = transfer.held.version
        for link in self.links.values():
            link.say(version, transfer.opening(part), segment)
        for link in self.links.values():
            if (note := link.opened_before(version, segment)) is not None:
                self._hear(link, part, note)

    def close(self, version: VersionId) -> None:
        self.active.pop(version, None)

    def stir(self) -> None:
        """Wake the links that may have something to send, and arm the timer. Call this after any call of a core."""
        for part in self._parts():
            for node in part.courier.ready():
                if (link := self.links.get(node)) is not None:
                    link.stream.wake()
        self._arm()

    def couriers(self, version: VersionId | None = None) -> list[Courier]:
        """Return the cores of all segments under way, or of those of one version."""
        of = self.active.values() if version is None else filter(None, [self.active.get(version)])
        return [part.courier for transfer in of for part in transfer.parts]

    def _parts(self) -> list[Part]:
        return [part for transfer in self.active.values() for part in transfer.parts]

    def _arm(self) -> None:
        if self._timer is not None or not self.active:
            return
        due = [at for part in self._parts() if (at := part.courier.deadline()) is not None]
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
        for part in self._parts():
            at = part.courier.deadline()
            if at is not None and at <= now + 0.005:
                part.courier.tick(now=now)
        self.stir()

    def _measure(self, now: float) -> None:
        if now - self._measured_at < RATE_S:
            return
        sent = self.sent_bytes - sum(link.stream.unacknowledged_bytes for link in self.links.values())
        rate = (sent - self._sent_before) / (now - self._measured_at)
        self.uplink_bytes_per_s = max(rate, PEAK_DECAY * self.uplink_bytes_per_s)
        for link in self.links.values():
            link.measure(now - self._measured_at)
        self._sent_before, self._measured_at = sent, now

    @property
    def sent_bytes(self) -> int:
        return self._sent_gone + sum(link.stream.sent_bytes for link in self.links.values())

    # -- frames ----------------------------------------------------------------------------------------------

    def hear(self, link: Link, version: VersionId, segment: int, note: Note) -> None:
        if isinstance(note, Complete) and not note.chunks:
            # The core must not hear of it: it would count on the peer's chunks.
            self._on_peer_complete(link.node, version)
            return
        if (found := self._find(version, segment)) is not None:
            self._hear(link, found[1], note)
        elif isinstance(note, Have | Complete) and (version, segment) > self._last_open():
            link.remember(version, segment, note)

    def _find(self, version: VersionId, segment: int) -> tuple[Transfer, Part] | None:
        transfer = self.active.get(version)
        return (transfer, transfer.parts[segment]) if transfer and segment < len(transfer.parts) else None

    def _last_open(self) -> tuple[VersionId, int]:
        version = max(self.active, default=NO_VERSION)
        return version, len(self.active[version].parts) - 1 if self.active else -1

    def _hear(self, link: Link, part: Part, note: Note) -> None:
        now = time.monotonic()
        if link.node not in part.joined:
            if not isinstance(note, Have | Complete):
                return
            part.joined.add(link.node)
            part.courier.join(link.node, leaf=self._is_leaf(link.node), now=now)
        part.courier.heard(link.node, note, now=now)
        self.stir()

    def take_chunk(self, link: Link, frame: Frame, payload: memoryview, via: NodeId | None) -> None:
        """Prove a chunk, write it to its place and tell the core, even if it is held already: it may be for forwarding.

        A chunk of a version that is not under way here is dropped without blame: the sender could not know.
        """
        found = self._find(frame.version, frame.segment)
        if found is None or link.node not in found[1].joined:
            return
        transfer, part = found
        chunks = transfer.held.chunks
        if frame.index >= len(part.chunks) or frame.kind not in KINDS:
            self.reject(link, "shape")
            return
        index = part.chunks[frame.index]
        if chunks.spans[index].nbytes != frame.size:
            self.reject(link, "shape")
            return
        if not chunks.has(index) and not chunks.put(index, payload):
            self.reject(link, "digest")
            return
        now = time.monotonic()
        transfer.first_chunk_at = transfer.first_chunk_at or now
        self._on_chunk(frame.version, index)
        part.courier.arrived(link.node, frame.index, NoteKind(frame.kind), via, now=now)
        if transfer.completed_at is None and chunks.complete:
            transfer.completed_at = now
            self._on_complete(transfer)
        self.stir()

    def send_part(self, version: VersionId, index: int, part: bytes, routes: Routing) -> None:
        """Send part `index` of a table to this node's children in its tree."""
        for child in routes.children_of(index):
            if (link := self.links.get(child)) is not None:
                link.send(FrameType.TABLE, version, part, kind=NoteKind.FRESH, index=index)

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
        self.bytes_per_s = 0.0  # Mean of about the last LINK_S
        self._sent_before = 0
        self._early: dict[tuple[VersionId, int], Have | Complete] = {}
        self._queue: deque[Outgoing] = deque()
        self._scratch = memoryview(bytearray(0))
        self._filler_bytes, self._fill_until = 0, 0.0

    def say(self, version: VersionId, note: Note, segment: int = 0) -> None:
        self.send(FrameType.NOTE, version, encode(note), segment=segment)

    def send(
        self,
        type_: int,
        version: VersionId,
        payload: bytes,
        *,
        kind: NoteKind = NoteKind.COPY,
        index: int = 0,
        segment: int = 0,
    ) -> None:
        """Queue a frame ahead of all chunks. If MAX_QUEUED are already waiting, close the link."""
        if len(self._queue) >= MAX_QUEUED:
            # Not at once: a caller that sends to all links is still going through them.
            full = ProtocolError("the link takes no frames")
            asyncio.get_running_loop().call_soon(self.stream.close, full)
            return
        frame = Frame(type_, len(payload), version, int(kind), index, segment=segment)
        self._queue.append(Outgoing(frame.pack(), payload))
        self.stream.wake()

    def fill(self) -> None:
        """Show the learner what this node can send: filler behind all else, for a short while. In that while it may ask
        as often as it likes: a probe costs no more than PROBE_BYTES in PROBE_S."""
        if (now := time.monotonic()) >= self._fill_until:
            self._filler_bytes, self._fill_until = PROBE_BYTES, now + PROBE_S
            self.stream.wake()

    def measure(self, elapsed_s: float) -> None:
        """Note what was sent in the last seconds."""
        sent, self._sent_before = self.stream.sent_bytes - self._sent_before, self.stream.sent_bytes
        self.bytes_per_s += min(1.0, elapsed_s / LINK_S) * (sent / elapsed_s - self.bytes_per_s)

    def remember(self, version: VersionId, segment: int, note: Have | Complete) -> None:
        """Remember that the peer has opened a segment, in case this node opens it later."""
        known = Have(bitmap=note.bitmap[:EARLY_BITMAP_BYTES]) if isinstance(note, Have) else note
        self._early[version, segment] = known
        while len(self._early) > MAX_EARLY:
            del self._early[min(self._early)]

    def opened_before(self, version: VersionId, segment: int) -> Have | Complete | None:
        """Return what the peer said it holds of a segment that this node opens now. Forget that and older ones."""
        note = self._early.get((version, segment))
        self._early = {later: early for later, early in self._early.items() if later > (version, segment)}
        return note

    # -- LinkEnd ---------------------------------------------------------------------------------------------

    def pull(self) -> Outgoing | None:
        if self._queue:
            return self._queue.popleft()
        now = time.monotonic()
        for transfer in self._transfers.active.values():
            for segment, part in enumerate(transfer.parts):
                if self.node in part.joined and (found := self._next_of(transfer, segment, part, now)) is not None:
                    return found
        if self._filler_bytes <= 0 or now >= self._fill_until:
            return None
        if any(transfer.completed_at is None for transfer in self._transfers.active.values()):
            return None
        self._filler_bytes -= FILLER_BYTES
        return Outgoing(FILLER_FRAME, FILLER_PAYLOAD)

    def _next_of(self, transfer: Transfer, segment: int, part: Part, now: float) -> Outgoing | None:
        found = part.courier.next_for(self.node, now=now)
        while isinstance(found, Send) and not transfer.held.chunks.has(part.chunks[found.index]):
            # This chunk turned out damaged on disk and is being fetched again. Peers that lack it will ask.
            part.courier.sent(self.node, found, now=now)
            found = part.courier.next_for(self.node, now=now)
        if isinstance(found, Send):
            return self._chunk(transfer, segment, part, found)
        if found is None:
            return None
        payload = encode(found)
        return Outgoing(Frame(FrameType.NOTE, len(payload), transfer.held.version, segment=segment).pack(), payload)

    def place(self, frame: Frame) -> memoryview:
        if frame.size > CAPS.get(frame.type, 0):
            raise ProtocolError(f"a frame of type {frame.type} has no {frame.size} bytes")
        if frame.type != FrameType.CHUNK:
            return memoryview(bytearray(frame.size))
        if len(self._scratch) < frame.size:
            self._scratch = memoryview(bytearray(frame.size))
        return self._scratch[: frame.size]

    def received(self, frame: Frame, payload: memoryview) -> None:
        if frame.type == FrameType.NOTE:
            self._transfers.hear(self, frame.version, frame.segment, read_note(payload))
        elif frame.type == FrameType.CHUNK:
            self._transfers.take_chunk(self, frame, payload, self._named(frame.via))
        elif frame.type in CAPS:
            self._transfers.on_frame(self.node, frame, bytes(payload))
        else:
            raise ProtocolError(f"a frame of type {frame.type} may not come here")

    def closed(self, error: Exception | None) -> None:
        self._transfers.link_closed(self)

    # -- chunks ----------------------------------------------------------------------------------------------

    def _chunk(self, transfer: Transfer, segment: int, part: Part, send: Send) -> Outgoing:
        payload = transfer.held.chunks.chunk(part.chunks[send.index])
        via = bytes.fromhex(send.via)[:8] if send.via is not None else b"\0" * 8
        version = transfer.held.version
        header = Frame(FrameType.CHUNK, len(payload), version, int(send.kind), send.index, via, segment).pack()

        def sent() -> None:
            transfer.sent_bytes += len(header) + len(payload)
            part.courier.sent(self.node, send, now=time.monotonic())
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
