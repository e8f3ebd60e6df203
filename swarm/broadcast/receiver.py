"""A receiver's whole data plane: links, the versions under way, and the weight map that follows them.

The learner announces versions. It signs the heads, and they prove the tables. While the learner is away, the newest
head comes from gossip. A node opens a version when its base is here or coming. It applies the version when all of it is
here and the map holds its base. A receiver that is further behind asks peers for stored deltas or full regions
(catchup.py), and the learner last.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

from swarm.broadcast.ahead import DecodingAhead
from swarm.broadcast.announcing import Announced, Announcements
from swarm.broadcast.catchup import catch_up
from swarm.broadcast.coding import in_thread
from swarm.broadcast.forest.courier import TreeCourier
from swarm.broadcast.mesh.forwarder import Forwarder
from swarm.broadcast.neighbours import Neighbours
from swarm.broadcast.notes import MAX_MEMBERS, Complete, Courier, NoteKind, Roster, Routing
from swarm.broadcast.store.base_model import BaseModel, begin_from_base
from swarm.broadcast.store.store import BegunVersion, ChunkFile, HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap, open_weights
from swarm.broadcast.transfers import (
    HEAD,
    MAX_ACTIVE,
    ROSTER,
    ROSTER_BYTES,
    ROUTES,
    ROUTES_BYTES,
    SEGMENT,
    TABLE,
    Link,
    Transfer,
    Transfers,
)
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
from swarm.net.links import Station
from swarm.net.stream import Frame, Incoming
from swarm.types import NodeId, VersionId
from swarm.wire import decode

MAX_TIMES = 16  # `status` shows the times of this many versions
Stage = Literal["announced_s", "first_chunk_s", "complete_s", "applied_s", "installed_s", "drawn_s"]
"""What a version goes through at a node, in this order: its head is here and proven; its first and its last chunk; all
of it is in the map; the engine holds it; the first sample that it drew has ended."""


class VersionProgress:
    """What a node holds of the versions under way and of those that it got another way."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._told_over: Link | None = None
        self._told: frozenset[VersionId] = frozenset()
        self.times: dict[VersionId, dict[str, float | None]] = {}

    def note_time(self, version: VersionId, stage: Stage, at: float | None = None) -> None:
        """Note that a stage is reached, now unless `at` is given. The first time counts."""
        times = self.times.setdefault(version, dict.fromkeys(get_args(Stage)))
        times[stage] = times[stage] or at or time.monotonic()
        while len(self.times) > MAX_TIMES:
            del self.times[min(self.times)]

    async def goes_on(self, news: asyncio.Event, patience_s: float) -> bool:
        """Wait for `news`. Return False once no chunk of a version under way has come for `patience_s`."""
        while True:
            missing = self._missing()
            try:
                async with asyncio.timeout(patience_s):
                    return await news.wait()
            except TimeoutError:
                if self._missing() == missing:
                    return False

    def _missing(self) -> dict[VersionId, int]:
        return {version: transfer.held.chunks.missing for version, transfer in self._transfers.active.items()}

    def tell(self, learner: NodeId, store: VersionStore, in_map: VersionId | None) -> None:
        """Tell the learner what is held and who gave it, once over each link."""
        link = self._transfers.links.get(learner)
        if link is None:
            return
        if link is not self._told_over:
            self._told_over, self._told = link, frozenset()
        held = {found.head.version for found in store.versions() if found.chunks.complete}
        if in_map is not None:
            held.add(in_map)
        for version in sorted(held - self._told):
            transfer = self._transfers.active.get(version)
            fed = tuple(transfer.fed.most_common(MAX_MEMBERS)) if transfer is not None else ()
            link.say(version, Complete(chunks=False, fed=fed))
        self._told = frozenset(held)


MAX_WAITING = 16
"""Announcements that may wait to be opened. More are dropped: the newest comes again with the next link."""

PATIENCE_S = 10.0
"""How long a node that is behind waits before it burdens the learner, so that its peers can get up to date; and how
long it waits for the next chunk before it fetches the rest, because a killed learner deals no more chunks."""

RETRY_S = 1.0  # Pause between two tries to catch up
COPY_AGAIN_S = 60.0  # Pause after a copy that did not succeed: damage is mended first, by the next version or a recheck
UNLINKED_S = 5.0  # A learner that is not linked for this long announces nothing: the node acts on gossip's head


class OtherModel(EchoError):
    """The learner trains another model than the one with which this node began."""


class Receiver:
    """One receiver of the versions that the owner of `learner_key` signs. `say` tells the person at the terminal.
    `place` gives a directory in memory for a map of so many bytes, or None."""

    def __init__(
        self,
        directory: Path,
        learner_key: bytes,
        station: Station,
        *,
        pool: Executor,
        say: Callable[[str], None],
        base: BaseModel | None = None,
        place: Callable[[int], Path | None] = lambda nbytes: None,
    ) -> None:
        self._place = place
        self._directory = directory
        self._learner_key = learner_key
        self._station = station
        self._say = say
        self._base = base
        self._pool = pool
        self._transfers = Transfers(
            is_leaf=lambda node: self._neighbours.is_leaf(node),
            on_frame=self._on_frame,
            on_link=lambda node, up: self._tell_learner(),
            on_complete=self._on_complete,
            on_fault=self._leave,
            on_chunk=lambda version, index: self._ahead.arrived(version, index),
        )
        self._ahead = DecodingAhead(lambda: self.weights, pool)
        self._neighbours = Neighbours(station, self._transfers.open_link)
        self._announcements = Announcements(self._queue)
        self._routes: dict[VersionId, Routing] = {}
        self._begun: BegunVersion | None = None
        self._announced: asyncio.Queue[Announced | Segment] = asyncio.Queue(maxsize=MAX_WAITING)
        self.may_fetch = asyncio.Event()
        """Whether weights may be fetched once the layout is here; a sampler asks its engine first."""
        self.may_fetch.set()
        self._layout: Layout | None = None  # That of the newest head
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()
        self._target: HeldVersion | None = None
        self._progress = VersionProgress(self._transfers)
        self._behind_since: float | None = None
        self._said = ""  # why it cannot catch up: a learner may be away for hours, and this node tries every second
        self.store: VersionStore | None = None
        self.weights: WeightMap | None = None
        self._steady = asyncio.Lock()
        self._filling = asyncio.Lock()  # Held while a copy of the map is written, or regions that no encoding here has

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            self.store = await in_thread(VersionStore, self._directory, self._learner_key)
            if self.store.layout is not None:
                self.weights = await self._open_weights(self.store, self.store.layout)
            self._neighbours.dial()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._open_announced())
                group.create_task(self._heed_gossip())
                group.create_task(self._keep_up())
                group.create_task(self._keep_copy())
                group.create_task(self._ahead.run())
        finally:
            await self._neighbours.close()
            self._announcements.close()
            for version in list(self._transfers.active):
                self._transfers.close(version)
            if self.weights is not None:
                self.weights.close()

    async def accept(self, incoming: Incoming) -> None:
        await self._neighbours.links.accept(incoming)

    # -- what the roles ask ----------------------------------------------------------------------------------

    async def layout(self) -> Layout:
        """Wait until the model is known, and return its tensors and files."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._layout is not None)
        return cast(Layout, self._layout)

    async def installed(self, than: VersionId | None) -> SignedVersion:
        """Wait until the map is newer than `than`, and return what it holds. To read the map, hold `steady`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newer_map(than) is not None)
        return cast(SignedVersion, self._newer_map(than))

    @asynccontextmanager
    async def steady(self) -> AsyncIterator[SignedVersion]:
        """Keep the map as it is within the block, and yield the version that it holds. Raise ProtocolError if none."""
        async with self._steady:
            if self.weights is None or self.weights.current is None:
                raise ProtocolError("the weights are being changed")
            yield self.weights.current

    @property
    def is_proven(self) -> bool:
        """Return whether all of the map is known to be what was signed: a file on a disk may have changed since."""
        return self.weights is not None and self.weights.in_memory

    def changes_since(self, version: VersionId | None) -> Path | None:
        """Return a file that says which words of the map have changed since `version` (store/changes.py), or None if
        nobody knows. Call it, in a thread, within `steady`."""
        return self.weights.changes_since(version) if version is not None and self.weights is not None else None

    async def recheck(self) -> int:
        """Find regions of the map that differ from what was written, and fetch them again. Return their count."""
        async with self._steady, self._filling:
            damaged = await in_thread(self.weights.recheck) if self.weights else 0
        self._say(f"{damaged} regions of the weights on disk are damaged{': fetching them again' if damaged else ''}")
        self._news.set()
        return damaged

    @property
    def version(self) -> VersionId | None:
        return self.weights.version if self.weights else None

    def note_time(self, version: VersionId, stage: Stage) -> None:
        """Note what became of a version after this node had it."""
        self._progress.note_time(version, stage)

    @property
    def uplink_bytes_per_s(self) -> float:
        return self._transfers.uplink_bytes_per_s

    def status(self) -> dict[str, Any]:
        active = self._transfers.active
        return {
            "map": str(self.version) if self.version else None,
            "streams": len(self._transfers.links),
            "stream_bytes_sent": self._transfers.sent_bytes,
            "uplink_bytes_per_s": round(self.uplink_bytes_per_s),
            "versions": {str(version): times for version, times in self._progress.times.items()},
            "chunks_held": {str(v): len(t.held.chunks.spans) - t.held.chunks.missing for v, t in active.items()},
            "chunks_rejected": dict(self._transfers.rejected),
            "syncing": self._syncing(),
        }

    def _syncing(self) -> dict[str, Any] | None:
        """Return the oldest version that is not whole here, with the share of its chunks that are."""
        for version, transfer in self._transfers.active.items():
            chunks, missing = len(transfer.held.chunks.spans), transfer.held.chunks.missing
            if missing:
                return {"version": str(version), "share": round(1 - missing / chunks, 3)}
        return None

    # -- announcements ---------------------------------------------------------------------------------------

    def _on_frame(self, node: NodeId, frame: Frame, payload: bytes) -> None:
        """Take an announcement. Only the learner sends heads and rosters; tables come from others too."""
        if frame.type == TABLE and (routes := self._routes.get(frame.version)) is not None:
            self._take_tree_part(node, frame, payload, routes)
        elif frame.type in (TABLE, SEGMENT):
            if frame.kind == NoteKind.FRESH and node == self._station.learner()[0]:
                self._pass_on(node, frame, payload)
            if self._is_news(frame.version):
                take = self._announcements.take_part if frame.type == TABLE else self._take_segment
                take(frame.version, frame.index, payload, node)
        elif node != self._station.learner()[0]:
            raise ProtocolError("only the learner announces")
        elif frame.type == ROSTER:
            self._neighbours.take_roster(decode(payload, Roster, cap_bytes=ROSTER_BYTES))
        elif frame.type == ROUTES:
            self._take_routes(frame.version, decode(payload, Routing, cap_bytes=ROUTES_BYTES))
        elif frame.type == HEAD:
            head = open_head(payload, self._learner_key)
            if self._is_news(head.version):
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
        if not self._is_news(frame.version):
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
        if not self._announced.full():
            self._announced.put_nowait(announced)

    def _leave(self, node: NodeId) -> None:
        self._say(f"node {node} sent wrong chunks again and again; ignoring it for a while")
        self._neighbours.links.bar(node)

    async def _open_announced(self) -> None:
        while True:
            announced = await self._announced.get()
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
                if self._is_news(head.version):
                    self._announcements.take_head(sealed, head)
            was_linked = is_linked

    async def _open(self, announced: Announced) -> None:
        head = announced.head
        if not self._is_news(head.version):
            return
        store = await self._with_layout(head)
        table_bytes, table = await self._table(announced, store)
        signed = SignedVersion(head=head, sealed_head=announced.sealed, table=table, table_bytes=table_bytes)
        held = await in_thread(store.begin, signed, await self._begun_chunks(store, signed))
        leaf = await self._neighbours.is_leaf_itself()
        from_base = await self._take_from_base(held)
        self._target = held
        self._progress.note_time(head.version, "announced_s")
        self._retire(held)
        if self.version == head.version:
            self._progress.note_time(head.version, "complete_s")
        # Without its base, here or coming, a version cannot be applied: its deltas are of no use to this node.
        if (self._base_comes(head.base) or not needs_base(table)) and not from_base:
            self._ahead.begin(held)
            self._transfers.open(held, partial(self._courier, head.version, leaf))
            if held.chunks.complete:
                self._progress.note_time(head.version, "complete_s")
        else:
            self._transfers.close(head.version)
        await self._tell()

    async def _open_segment(self, segment: Segment) -> None:
        """Take part in a segment of a version that the learner is still encoding, if those before it are open. If not,
        its chunks come once the head is here."""
        store, begun, version = self.store, self._begun, segment.version
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
        self._progress.note_time(version, "announced_s")
        leaf = await self._neighbours.is_leaf_itself()
        self._ahead.begin(self._begun)
        self._transfers.open(self._begun, partial(self._courier, version, leaf))

    def _can_begin(self, segment: Segment) -> bool:
        """Return True if the version of a segment is news, its base is here or coming, and there is room for it."""
        store, active = self.store, self._transfers.active
        return (
            store is not None
            and store.layout_digest == segment.layout_digest
            and self._is_news(segment.version)
            and store.find(segment.version) is None
            and self._base_comes(segment.base)
            and (segment.version in active or len(active) < MAX_ACTIVE)
            # A node that has most of its first version already takes the rest another way.
            and (self._base is None or self.version is not None)
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
        assert self.weights is not None
        if self._base is None or self.weights.last_whole is not None or self._transfers.active:
            return False
        async with self._steady, self._filling:
            left = await in_thread(begin_from_base, self._base, self.weights, held)
        self._say(f"{self._base.directory} has all but {left / 1e6:.1f} MB of version {held.head.version}")
        routes = self._routes.get(held.head.version)
        return 2 * left < self.weights.layout.total_bytes and not (routes is not None and any(routes.children))

    def _courier(self, version: VersionId, leaf: bool, count: int, have: bytes) -> Courier:
        """Create this node's part in a segment: in the trees if the learner gave it a place there, else in the mesh."""
        learner, _ = self._station.learner()
        if (routes := self._routes.get(version)) is not None:
            return TreeCourier(count=count, learner=learner, routes=routes, held=have, random=self._station.random)
        return Forwarder(learner, count, leaf=leaf, now=time.monotonic(), have=have)

    async def _table(self, announced: Announced, store: VersionStore) -> tuple[bytes, ChunkTable]:
        """Return the table from its parts or, if they do not make the signed one, from the learner or a peer."""
        head, layout = announced.head, store.layout
        assert layout is not None
        if (data := announced.parts.whole()) is not None:
            try:
                return data, await in_thread(open_table, data, head, layout)
            except ProtocolError:
                self._transfers.rejected["table"] += 1
        data, table = await self._neighbours.fetch(
            head.table_digest, head.table_bytes, lambda data: open_table(data, head, layout), "its chunk table"
        )
        in_trees = head.version in self._routes
        for liar in () if in_trees else announced.parts.liars(data):
            if (link := self._transfers.links.get(liar)) is not None:
                self._transfers.reject(link, "table")
        return data, table

    async def _with_layout(self, head: Head) -> VersionStore:
        """Return the store with the head's layout, fetched if it is not here. Raise OtherModel if the model changed."""
        assert self.store is not None
        if self.store.layout_digest == head.layout_digest:
            await self._admitted(self.store.layout)
            return self.store
        if self.store.layout is not None and self._target is not None:
            raise OtherModel("the learner now trains another model")
        data, layout = await self._neighbours.fetch(
            head.layout_digest, LAYOUT_BYTES, lambda data: open_layout(data, head), "the layout of the model"
        )
        await self._admitted(layout)
        if self.weights is not None:
            self.weights.close()
            self.weights = None
        await in_thread(self.store.set_layout, data, layout)
        self.weights = await self._open_weights(self.store, layout)
        return self.store

    async def _admitted(self, layout: Layout | None) -> None:
        """Tell what the model is, and wait until its weights may be fetched."""
        async with self._changed:
            self._layout = layout
            self._changed.notify_all()
        await self.may_fetch.wait()

    async def _open_weights(self, store: VersionStore, layout: Layout) -> WeightMap:
        memory = await in_thread(self._place, layout.total_bytes)
        return await in_thread(open_weights, store, self._pool, memory)

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

    def _tell_learner(self) -> None:
        """Tell the learner what this node has, however it got it: the learner waits for no node that has a version."""
        if self.store is not None:
            self._progress.tell(self._station.learner()[0], self.store, self.version)

    # -- the map ---------------------------------------------------------------------------------------------

    def _on_complete(self, transfer: Transfer) -> None:
        version = transfer.held.version
        self._ahead.end(version)
        self._progress.note_time(version, "first_chunk_s", transfer.first_chunk_at)
        self._progress.note_time(version, "complete_s", transfer.completed_at)
        self._news.set()

    async def _keep_up(self) -> None:
        """Apply what is here, in order. Fetch what cannot come by itself."""
        while True:
            self._news.clear()
            if not self._is_behind():
                await self._news.wait()
            elif (held := self._next_to_apply()) is not None:
                await self._apply(held)
            elif self._comes_by_itself() and await self._progress.goes_on(self._news, PATIENCE_S):
                continue
            else:
                await self._fetch_rest()

    async def _apply(self, held: HeldVersion) -> None:
        assert self.weights is not None
        assert self.store is not None
        before = self.weights.last_whole
        try:
            async with self._steady:
                await in_thread(self.weights.apply, held, self._pool)
        except ProtocolError as fault:
            self._say(f"version {held.head.version} cannot be applied, fetching it again: {fault}")
            self._transfers.close(held.head.version)
            return
        self._progress.note_time(held.head.version, "applied_s")
        held.chunks.rest()
        if before is None or held.head.version > before:
            # Else the map is only what it was before a catch-up that failed, and the learner has to be asked.
            self._behind_since = None
        await self._prune()
        await self._tell()

    async def _prune(self) -> None:
        assert self.weights is not None
        assert self.store is not None
        self.store.keep_from = self.weights.log_from
        await in_thread(self.store.prune)

    async def _keep_copy(self) -> None:
        """Bring the disk's copy of a map in memory up to date whenever that is due."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._copy_is_due)
            assert self.weights is not None
            stop = threading.Event()
            async with self._filling:
                copying = asyncio.create_task(in_thread(self.weights.copy_out, stop))
                try:
                    copied = await asyncio.shield(copying)
                except asyncio.CancelledError:
                    stop.set()
                    await copying
                    raise
            if not copied:
                await asyncio.sleep(COPY_AGAIN_S)
            await self._prune()

    def _copy_is_due(self) -> bool:
        return self.store is not None and self.weights is not None and self.weights.copy_is_due(self.store.versions())

    def _next_to_apply(self) -> HeldVersion | None:
        """Return the newest version that is here in full and that the map can become."""
        assert self.weights is not None
        for held in reversed(self._under_way()):
            newer = self.version is None or held.head.version > self.version
            if newer and held.chunks.complete and self.weights.can_become(held):
                return held
        return None

    def _comes_by_itself(self) -> bool:
        """Return True if a version under way is incomplete and its base is in the map or under way too."""
        return any(
            not one.chunks.complete and (self._base_comes(one.head.base) or not needs_base(one.table))
            for one in self._under_way()
        )

    def _under_way(self) -> list[HeldVersion]:
        return [one.held for one in self._transfers.active.values() if isinstance(one.held, HeldVersion)]

    def _base_comes(self, base: VersionId | None) -> bool:
        return base is None or base == self.version or base in self._transfers.active

    async def _fetch_rest(self) -> None:
        """Ask peers that are up to date, and the learner once they have had time to get there."""
        assert self.weights is not None
        assert self.store is not None
        assert self._target is not None
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        sources = self._neighbours.publics()
        # A node that has only just been linked does not know yet whom it could ask.
        patient = (sources or not self._neighbours.none_is_public()) and now - self._behind_since < PATIENCE_S
        try:
            async with self._steady, self._filling:
                await catch_up(
                    self.store,
                    self.weights,
                    self._target,
                    sources,
                    pool=self._pool,
                    learner=self._neighbours.learner(),
                    patient=patient,
                    meter=self._station.download.flow,
                )
            self._behind_since = None
            self._progress.note_time(self._target.head.version, "complete_s")
            self._progress.note_time(self._target.head.version, "applied_s")
        except (PeerUnreachable, ProtocolError) as fault:
            words = f"cannot catch up with version {self._target.head.version} yet: {fault}"
            if not patient and words != self._said:
                self._said = words
                self._say(words)
            await asyncio.sleep(RETRY_S)
        await self._tell()

    # -- parts -----------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        self._tell_learner()
        self._news.set()
        async with self._changed:
            self._changed.notify_all()

    def _is_news(self, version: VersionId) -> bool:
        if self._target is not None:
            return version > self._target.head.version
        # After a restart somebody may offer less than this node held.
        current = self.weights.current if self.weights else None
        return current is None or version >= current.head.version

    def _is_behind(self) -> bool:
        return self._target is not None and self.version != self._target.head.version

    def _newer_map(self, than: VersionId | None) -> SignedVersion | None:
        current = self.weights.current if self.weights else None
        newer = current is not None and (than is None or current.head.version > than)
        return current if newer else None
