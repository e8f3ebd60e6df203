"""Opening the versions that the learner announces: head, table, layout, and this node's part in the transfer.

The learner signs the heads, and they prove the tables. While the learner is away, the newest head comes from gossip. A
node takes part in a version when its base is here or coming.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from swarm.aio import unless_stopped
from swarm.broadcast.announcing import Announced, Announcements
from swarm.broadcast.coding import in_thread
from swarm.broadcast.forest.courier import TreeCourier
from swarm.broadcast.frames import CAPS, FrameType
from swarm.broadcast.mesh.forwarder import Forwarder
from swarm.broadcast.notes import Courier, NoteKind, Roster, Routing
from swarm.broadcast.receiver.ahead import DecodingAhead
from swarm.broadcast.receiver.neighbours import Neighbours
from swarm.broadcast.receiver.upkeep import RETRY_S, Upkeep
from swarm.broadcast.store.base_model import BaseModel, begin_from_base
from swarm.broadcast.store.store import BegunVersion, ChunkFile, HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.transfers import MAX_ACTIVE, Transfers
from swarm.broadcast.version.manifest import (
    LAYOUT_BYTES,
    ChunkTable,
    Head,
    Layout,
    Segment,
    check_segment,
    needs_base,
    open_head,
    open_layout,
    open_segment,
    open_table,
)
from swarm.errors import EchoError, PeerUnreachable, ProtocolError
from swarm.net.links import NO_VERSION, Station
from swarm.net.stream import Frame
from swarm.types import NodeId, VersionId
from swarm.wire import decode

MAX_WAITING = 16
"""Announcements that may wait to be opened. More are dropped: the newest comes again with the next link."""

UNLINKED_S = 5.0  # A learner that is not linked for this long announces nothing: the node acts on gossip's head


class OtherModel(EchoError):
    """The learner trains another model than the one with which this node began."""


class Opening:
    """Takes announcements, and opens the versions that are news to `upkeep`."""

    def __init__(
        self,
        learner_key: bytes,
        station: Station,
        transfers: Transfers,
        neighbours: Neighbours,
        upkeep: Upkeep,
        ahead: DecodingAhead,
        *,
        say: Callable[[str], None],
        base: BaseModel | None,
    ) -> None:
        self._learner_key = learner_key
        self._station = station
        self._transfers = transfers
        self._neighbours = neighbours
        self._upkeep = upkeep
        self._ahead = ahead
        self._say = say
        self._base = base
        self._announcements = Announcements(self._queue)
        self._routes: dict[VersionId, Routing] = {}
        self._begun: BegunVersion | None = None
        self._announced: asyncio.Queue[Announced | Segment] = asyncio.Queue(maxsize=MAX_WAITING)
        self._newest = NO_VERSION  # That was announced
        self._newer = asyncio.Event()  # Set while a newer version is announced than the one that is being opened
        self._layout: Layout | None = None  # That of the newest head
        self._known = asyncio.Condition()
        self.may_fetch = asyncio.Event()
        """Whether weights may be fetched once the layout is here; a sampler asks its engine first."""
        self.may_fetch.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._open_announced())
            group.create_task(self._heed_gossip())

    def close(self) -> None:
        self._announcements.close()

    async def layout(self) -> Layout:
        """Wait until the model is known, and return its tensors and files."""
        async with self._known:
            await self._known.wait_for(lambda: self._layout is not None)
        return cast(Layout, self._layout)

    def on_frame(self, node: NodeId, frame: Frame, payload: bytes) -> None:
        """Take an announcement. Only the learner sends heads and rosters; tables come from others too."""
        if frame.type == FrameType.TABLE and (routes := self._routes.get(frame.version)) is not None:
            self._take_tree_part(node, frame, payload, routes)
        elif frame.type in (FrameType.TABLE, FrameType.SEGMENT):
            if frame.kind == NoteKind.FRESH and node == self._station.learner()[0]:
                self._pass_on(node, frame, payload)
            if self._upkeep.is_news(frame.version):
                take = self._announcements.take_part if frame.type == FrameType.TABLE else self._take_segment
                take(frame.version, frame.index, payload, node)
        elif node != self._station.learner()[0]:
            raise ProtocolError("only the learner announces")
        elif frame.type == FrameType.ROSTER:
            self._neighbours.take_roster(decode(payload, Roster, cap_bytes=CAPS[FrameType.ROSTER]))
        elif frame.type == FrameType.PROBE:
            self._transfers.links[node].fill()
        elif frame.type == FrameType.ROUTES:
            self._take_routes(frame.version, decode(payload, Routing, cap_bytes=CAPS[FrameType.ROUTES]))
        elif frame.type == FrameType.HEAD:
            head = open_head(payload, self._learner_key)
            if self._upkeep.is_news(head.version):
                self._announcements.take_head(payload, head)

    def _take_routes(self, version: VersionId, routes: Routing) -> None:
        """Take this node's place in the trees of a version, before or while the version is under way."""
        if len(routes.parents) != len(routes.children):
            raise ProtocolError("routes have a parent and children for each stripe")
        self._routes[version] = routes
        while len(self._routes) > MAX_ACTIVE:
            del self._routes[min(self._routes)]
        for courier in self._transfers.couriers(version):
            if isinstance(courier, TreeCourier) and courier.stripes == len(routes.parents):
                courier.set_routes(routes, now=time.monotonic())
        self._transfers.stir()

    def _pass_on(self, node: NodeId, frame: Frame, payload: bytes) -> None:
        for peer, link in self._transfers.links.items():
            if peer != node:
                link.send(frame.type, frame.version, payload, index=frame.index)

    def _take_tree_part(self, node: NodeId, frame: Frame, payload: bytes, routes: Routing) -> None:
        """Take a part of a table, and send it on down its tree, but once: a parent that says it again and again must
        not spend this node's uplink."""
        if not self._upkeep.is_news(frame.version):
            return
        is_new = self._announcements.take_part(frame.version, frame.index, payload, node)
        if is_new and frame.kind == NoteKind.FRESH and node == routes.parent_of(frame.index):
            self._transfers.send_part(frame.version, frame.index, payload, routes)

    def _take_segment(self, version: VersionId, number: int, sealed: bytes, sender: NodeId) -> None:
        """Take the table of one segment, from any linked node."""
        begun = self._begun if self._begun is not None and self._begun.version == version else None
        if begun is not None and number < len(begun.table.cuts):
            if number > 0 or sender != self._station.learner()[0]:
                return
            if begun.table.begins_with(open_segment(sealed, self._learner_key).table):
                return
            # The learner was killed and encodes other weights now. At once: it says next what it holds of them.
            self._transfers.close(version)
        # The head, which brings all that was dropped here, needs room to wait.
        if 2 * self._announced.qsize() < MAX_WAITING:
            self._announced.put_nowait(open_segment(sealed, self._learner_key))

    def _queue(self, announced: Announced) -> None:
        if self._announced.full():
            return
        self._announced.put_nowait(announced)
        if announced.version > self._newest:
            self._newest = announced.version
            self._newer.set()

    async def _open_announced(self) -> None:
        while True:
            announced = await self._announced.get()
            if announced.version >= self._newest:
                self._newer.clear()
            try:
                await (self._open_segment(announced) if isinstance(announced, Segment) else self._open(announced))
            except ProtocolError as fault:
                self._say(f"version {announced.version} was announced and cannot be taken: {fault}")
            except PeerUnreachable as fault:
                self._say(f"version {announced.version} was announced and cannot be taken yet: {fault}")
                await asyncio.sleep(RETRY_S)
                if self._announced.empty():
                    self._announced.put_nowait(announced)

    async def _heed_gossip(self) -> None:
        """While no learner is linked to announce anything, take the newest head from gossip: peers may have it."""
        was_linked = True
        while True:
            await asyncio.sleep(UNLINKED_S)
            is_linked = self._station.learner()[0] in self._transfers.links
            if not is_linked and not was_linked and (sealed := self._station.head()):
                head = open_head(sealed, self._learner_key)
                if self._upkeep.is_news(head.version):
                    self._announcements.take_head(sealed, head)
            was_linked = is_linked

    async def _open(self, announced: Announced) -> None:
        head = announced.head
        if not self._upkeep.is_news(head.version):
            return
        store = await self._with_layout(head)
        if (found := await self._table(announced, store)) is None:
            return
        table_bytes, table = found
        signed = SignedVersion(head=head, sealed_head=announced.sealed, table=table, table_bytes=table_bytes)
        held = await in_thread(store.begin, signed, await self._begun_chunks(store, signed))
        leaf = await self._neighbours.is_leaf_itself()
        from_base = await self._take_from_base(held)
        self._upkeep.target = held
        self._upkeep.progress.note_time(head.version, "announced_s")
        self._retire(held)
        if self._upkeep.version == head.version:
            self._upkeep.progress.note_time(head.version, "complete_s")
        # Without its base, here or coming, a version cannot be applied: its deltas are of no use to this node.
        if (self._upkeep.base_comes(head.base) or not needs_base(table)) and not from_base:
            self._ahead.begin(held)
            self._transfers.open(held, partial(self._courier, head.version, leaf))
            if held.chunks.complete:
                self._upkeep.progress.note_time(head.version, "complete_s")
        else:
            self._transfers.close(head.version)
        await self._upkeep.tell()

    async def _open_segment(self, segment: Segment) -> None:
        """Take part in a segment of a version that the learner is still encoding, if those before it are open. If not,
        its chunks come once the head is here."""
        store, begun, version = self._upkeep.store, self._begun, segment.version
        if not self._can_begin(segment) or store is None or store.layout is None:
            return
        check_segment(segment, store.layout)
        if segment.number == segment.first == 0:
            await self._give_up_begun(store)
            table = segment.table
            chunks = await in_thread(ChunkFile, store.chunks_path(version), table)
        elif (
            begun is not None
            and begun.version == version
            and (segment.number, segment.first) == (len(begun.table.cuts), len(begun.table.regions))
        ):
            table, chunks = begun.table.with_segment(segment.table), begun.chunks
            await in_thread(chunks.grow, table)
        else:
            return
        self._begun = BegunVersion(version=version, base=segment.base, table=table, chunks=chunks)
        self._upkeep.progress.note_time(version, "announced_s")
        leaf = await self._neighbours.is_leaf_itself()
        self._ahead.begin(self._begun)
        self._transfers.open(self._begun, partial(self._courier, version, leaf))

    def _can_begin(self, segment: Segment) -> bool:
        """Return True if the version of a segment is news, its base is here or coming, and there is room for it."""
        store, active = self._upkeep.store, self._transfers.active
        return (
            store is not None
            and store.layout_digest == segment.layout_digest
            and self._upkeep.is_news(segment.version)
            and store.find(segment.version) is None
            and self._upkeep.base_comes(segment.base)
            and (segment.version in active or len(active) < MAX_ACTIVE)
            # A node that has most of its first version already takes the rest another way.
            and (self._base is None or self._upkeep.version is not None)
        )

    async def _begun_chunks(self, store: VersionStore, signed: SignedVersion) -> ChunkFile | None:
        """Return the file that was begun with the first segments of a version that has a head now. Give up what was
        begun and has become another, or never will have a head."""
        begun = self._begun
        if begun is None or begun.version > signed.version:
            return None
        if begun.version == signed.version and signed.table.begins_with(begun.table):
            self._begun = None
            return begun.chunks
        await self._give_up_begun(store)
        return None

    async def _give_up_begun(self, store: VersionStore) -> None:
        if self._begun is not None:
            self._ahead.end(self._begun.version)
            self._transfers.close(self._begun.version)
            await in_thread(store.drop, self._begun.version)
        self._begun = None

    async def _take_from_base(self, held: HeldVersion) -> bool:
        """Take what the local base model has of this node's first version. Return True if less than half is left, which
        is better fetched by regions than streamed. A node that feeds others in the trees streams all of it."""
        assert self._upkeep.weights is not None
        if self._base is None or self._upkeep.weights.last_whole is not None or self._transfers.active:
            return False
        async with self._upkeep.filling():
            left = await in_thread(begin_from_base, self._base, self._upkeep.weights, held)
        self._say(f"{self._base.directory} has all but {left / 1e6:.1f} MB of version {held.head.version}")
        routes = self._routes.get(held.head.version)
        return 2 * left < self._upkeep.weights.layout.total_bytes and not (routes is not None and any(routes.children))

    def _courier(self, version: VersionId, leaf: bool, count: int, have: bytes) -> Courier:
        """Create this node's part in a segment: in the trees if the learner gave it a place there, else in the mesh."""
        learner, _ = self._station.learner()
        if (routes := self._routes.get(version)) is not None:
            return TreeCourier(count=count, learner=learner, routes=routes, held=have, random=self._station.random)
        return Forwarder(learner, count, leaf=leaf, now=time.monotonic(), have=have)

    async def _table(self, announced: Announced, store: VersionStore) -> tuple[bytes, ChunkTable] | None:
        """Return the table from its parts or, if they do not make the signed one, from the learner or a peer; or None
        once a newer version is announced: a slow peer must not hold that up, and catching up brings this one too."""
        head, layout = announced.head, store.layout
        assert layout is not None
        if (data := announced.table()) is not None:
            try:
                return data, await in_thread(open_table, data, head, layout)
            except ProtocolError:
                self._transfers.rejected["table"] += 1
        fetching = self._neighbours.fetch(
            head.table_digest, head.table_bytes, lambda data: open_table(data, head, layout), "its chunk table"
        )
        if (found := await unless_stopped(self._newer, fetching)) is None:
            return None
        data, table = found
        in_trees = head.version in self._routes
        for liar in () if in_trees else announced.liars(data):
            if (link := self._transfers.links.get(liar)) is not None:
                self._transfers.reject(link, "table")
        return data, table

    async def _with_layout(self, head: Head) -> VersionStore:
        """Return the store with the head's layout, fetched if it is not here. Raise OtherModel if the model changed."""
        assert self._upkeep.store is not None
        if self._upkeep.store.layout_digest == head.layout_digest:
            await self._admitted(self._upkeep.store.layout)
            return self._upkeep.store
        if self._upkeep.store.layout is not None and self._upkeep.target is not None:
            raise OtherModel("the learner now trains another model")
        data, layout = await self._neighbours.fetch(
            head.layout_digest, LAYOUT_BYTES, lambda data: open_layout(data, head), "the layout of the model"
        )
        await self._admitted(layout)
        await self._upkeep.begin(data, layout)
        return self._upkeep.store

    async def _admitted(self, layout: Layout | None) -> None:
        """Tell what the model is, and wait until its weights may be fetched."""
        async with self._known:
            self._layout = layout
            self._known.notify_all()
        await self.may_fetch.wait()

    def _retire(self, newer: HeldVersion) -> None:
        """Leave the transfers that a newer version makes needless: complete ones except the last and, if the newer
        version needs no base, incomplete ones."""
        active = self._transfers.active
        elders = [v for v in active if v < newer.head.version]
        for version in elders:
            whole = active[version].completed_at is not None
            if (whole and version != elders[-1]) or (not whole and not needs_base(newer.table)):
                self._transfers.close(version)
        while len(active := self._transfers.active) >= MAX_ACTIVE:
            self._transfers.close(min(active))
