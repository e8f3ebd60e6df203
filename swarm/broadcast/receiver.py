"""A receiver's whole data plane: links, the versions under way, and the weight map that is brought up to date.

Announcements come from the learner alone, heads signed, tables proven by them. A version is opened when its base is
here or coming; it is applied when all of it is here and the map holds its base. Whoever is behind that asks peers for
stored deltas or full regions (catchup.py), the learner last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swarm.broadcast.basemodel import BaseModel
from swarm.broadcast.catchup import catch_up
from swarm.broadcast.links import Station
from swarm.broadcast.manifest import (
    LAYOUT_BYTES,
    ChunkTable,
    Head,
    Layout,
    needs_base,
    open_head,
    open_layout,
    open_table,
)
from swarm.broadcast.notes import Courier, Kind
from swarm.broadcast.planner import Routes
from swarm.broadcast.planning import routes_in
from swarm.broadcast.relay import Relay
from swarm.broadcast.roster import Roster, Routing, whom_to_dial
from swarm.broadcast.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.tables import MOST_PARTS, TableParts
from swarm.broadcast.transfers import (
    HEAD,
    MAX_ACTIVE,
    ROSTER,
    ROSTER_BYTES,
    ROUTES,
    ROUTES_BYTES,
    TABLE,
    Transfer,
    Transfers,
)
from swarm.broadcast.tree import TreeCourier
from swarm.broadcast.weights import WeightMap, open_weights
from swarm.errors import EchoError, PeerUnreachable, ProtocolError
from swarm.http import Peer
from swarm.stream import Frame, Incoming
from swarm.types import Address, NodeId, VersionId
from swarm.wire import decode

MAX_ANNOUNCED = 16
"""Announcements that wait to be opened; more are dropped, and the newest comes again with the next link."""

PATIENCE_S = 10.0
"""How long a node that is behind waits for its peers to be up to date before it burdens the learner."""

RETRY_S = 1.0
"""Between two tries to catch up."""

FETCH_S = 60.0
"""Time limit for the layout: 32 MiB at 4.5 Mbit/s."""

MAX_TIMES = 16
"""Versions whose times `status` shows."""


TABLE_S = 2.0
"""A table that is not complete so long after its head is asked for: a relay may have died with a part of it."""


class _Announced:
    """A head, and the parts of its table."""

    def __init__(self, sealed: bytes, head: Head) -> None:
        self.sealed = sealed
        self.head = head
        self.parts = TableParts(head.table_bytes)
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class OtherModel(EchoError):
    """The learner trains another model than the one this node has begun with."""


class Receiver:
    """One receiver of the versions that the owner of `learner_key` signs. `say` tells the person at the terminal."""

    def __init__(
        self,
        directory: Path,
        learner_key: bytes,
        station: Station,
        *,
        pool: Executor,
        say: Callable[[str], None],
        base: BaseModel | None = None,
    ) -> None:
        self._directory = directory
        self._learner_key = learner_key
        self._station = station
        self._say = say
        self._base = base
        self._pool = pool
        self._roster = Roster(members=())
        self._transfers = Transfers(
            is_leaf=self._is_leaf,
            on_frame=self._on_frame,
            on_link=lambda node, up: None,
            on_complete=self._on_complete,
            on_fault=self._leave,
        )
        self._links = station.links(self._transfers.open_link, self._admits)
        self._heads: dict[VersionId, _Announced] = {}
        self._routes: dict[VersionId, Routes] = {}
        self._early_parts: dict[VersionId, list[tuple[NodeId, Frame, bytes]]] = {}
        self._announced: asyncio.Queue[_Announced] = asyncio.Queue(maxsize=MAX_ANNOUNCED)
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()
        self._target: HeldVersion | None = None
        self._times: dict[VersionId, dict[str, float | None]] = {}
        self._behind_since: float | None = None
        self.store: VersionStore | None = None
        self.weights: WeightMap | None = None
        self._steady = asyncio.Lock()

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until cancelled."""
        try:
            self.store = await asyncio.to_thread(VersionStore, self._directory, self._learner_key)
            if self.store.layout is not None:
                self.weights = await asyncio.to_thread(open_weights, self.store)
            learner, _ = self._station.learner()
            self._links.dial({learner: lambda: self._station.learner()[1]})
            async with asyncio.TaskGroup() as group:
                group.create_task(self._open_announced())
                group.create_task(self._keep_up())
        finally:
            await self._links.close()
            for announced in self._heads.values():
                announced.cancel()
            for version in list(self._transfers.active):
                self._transfers.close(version)

    async def accept(self, incoming: Incoming) -> None:
        """Take a stream that a peer opened."""
        await self._links.accept(incoming)

    # -- what the roles ask ----------------------------------------------------------------------------------

    async def layout(self) -> Layout:
        """The tensors and files of the model, once they are known."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._target is not None)
        assert self.store is not None
        assert self.store.layout is not None
        return self.store.layout

    async def installed(self, than: VersionId | None) -> SignedVersion:
        """What the map holds, once that is newer than `than`. To read the map, hold `steady`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newer_map(than) is not None)
        found = self._newer_map(than)
        assert found is not None
        return found

    @asynccontextmanager
    async def steady(self) -> AsyncIterator[SignedVersion]:
        """Within the block nothing is applied to the map, which holds the version that is given."""
        async with self._steady:
            found = self._newer_map(None)
            if found is None:
                raise ProtocolError("the weights are being changed")
            yield found

    @property
    def version(self) -> VersionId | None:
        return self.weights.version if self.weights else None

    @property
    def layout_digest(self) -> bytes:
        return self.store.layout_digest if self.store else b""

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
            "versions": {str(version): times for version, times in self._times.items()},
            "chunks_held": {str(v): len(t.held.chunks.spans) - t.held.chunks.missing for v, t in active.items()},
            "chunks_rejected": dict(self._transfers.rejected),
        }

    # -- announcements ---------------------------------------------------------------------------------------

    def _on_frame(self, node: NodeId, frame: Frame, payload: bytes) -> None:
        """Heads and rosters are the learner's to send; parts of a table come from others too."""
        if frame.type == TABLE:
            self._take_part(node, frame, payload)
        elif node != self._station.learner()[0]:
            raise ProtocolError("only the learner announces")
        elif frame.type == ROSTER:
            self._take_roster(decode(payload, Roster, cap_bytes=ROSTER_BYTES))
        elif frame.type == ROUTES:
            self._take_routes(frame.version, decode(payload, Routing, cap_bytes=ROUTES_BYTES))
        elif frame.type == HEAD:
            head = open_head(payload, self._learner_key)
            if self._target is None or head.version > self._target.head.version:
                self._heads[head.version] = announced = _Announced(payload, head)
                announced.timer = asyncio.get_running_loop().call_later(TABLE_S, self._queue, announced)
                while len(self._heads) > MAX_ACTIVE:
                    self._heads.pop(min(self._heads)).cancel()
                for part in self._early_parts.pop(head.version, []):
                    self._take_part(*part)

    def _take_routes(self, version: VersionId, routing: Routing) -> None:
        """This node's place in the trees of a version, before or while it is under way."""
        routes = routes_in(routing)
        if len(routes.parents) != len(routes.children):
            raise ProtocolError("routes have a parent and children for each stripe")
        self._routes[version] = routes
        while len(self._routes) > MAX_ACTIVE:
            del self._routes[min(self._routes)]
        transfer = self._transfers.active.get(version)
        if (
            transfer is not None
            and isinstance(transfer.courier, TreeCourier)
            and transfer.courier.stripes == len(routes.parents)
        ):
            transfer.courier.set_routes(routes, now=time.monotonic())
            self._transfers.stir()

    def _take_part(self, node: NodeId, frame: Frame, payload: bytes) -> None:
        """Pass a part on if the learner says so, and keep it; one may overtake the head."""
        if frame.kind == Kind.FRESH and node == self._station.learner()[0]:
            for peer, link in self._transfers.links.items():
                if peer != node:
                    link.send(TABLE, frame.version, payload, index=frame.index)
        if (announced := self._heads.get(frame.version)) is None:
            early = self._early_parts.setdefault(frame.version, [])
            if len(early) < MOST_PARTS:
                early.append((node, frame, payload))
            while len(self._early_parts) > MAX_ACTIVE:
                del self._early_parts[min(self._early_parts)]
        elif announced.parts.put(frame.index, payload, node) and announced.parts.whole() is not None:
            self._queue(announced)

    def _queue(self, announced: _Announced) -> None:
        """Have a version opened: its table is here, or does not come by itself."""
        announced.cancel()
        if self._heads.pop(announced.head.version, None) is not None and not self._announced.full():
            self._announced.put_nowait(announced)

    def _take_roster(self, roster: Roster) -> None:
        self._roster = roster
        learner, _ = self._station.learner()
        wanted: dict[NodeId, Callable[[], list[Address]]] = {learner: lambda: self._station.learner()[1]}
        for node, addresses in whom_to_dial(self._station.me, roster).items():
            wanted[node] = lambda addresses=addresses: list(addresses)  # type: ignore[misc]
        self._links.dial(wanted)

    def _is_leaf(self, node: NodeId) -> bool:
        return next((member.is_leaf for member in self._roster.members if member.node == node), False)

    def _admits(self, node: NodeId) -> bool:
        return any(member.node == node for member in self._roster.members)

    def _leave(self, node: NodeId) -> None:
        self._say(f"node {node} sent wrong chunks again and again; having nothing to do with it for a while")
        self._links.bar(node)

    async def _open_announced(self) -> None:
        while True:
            announced = await self._announced.get()
            try:
                await self._open(announced)
            except ProtocolError as fault:
                self._say(f"version {announced.head.version} was announced and cannot be taken: {fault}")
            except PeerUnreachable as fault:
                self._say(f"version {announced.head.version} was announced and cannot be taken yet: {fault}")
                await asyncio.sleep(RETRY_S)
                if self._announced.empty():
                    self._announced.put_nowait(announced)

    async def _open(self, announced: _Announced) -> None:
        head = announced.head
        if self._target is not None and head.version <= self._target.head.version:
            return
        store = await self._with_layout(head)
        table_bytes, table = await self._table(announced, store)
        held = await asyncio.to_thread(store.begin, announced.sealed, head, table_bytes, table)
        self._target = held
        self._note_time(head.version, "announced_s")
        self._retire(held)
        if self._is_within_reach(held):
            self._transfers.open(held, self._courier(held))
            if held.chunks.complete:
                self._note_time(head.version, "complete_s")
        await self._tell()

    def _courier(self, held: HeldVersion) -> Courier:
        """This node's part: in the trees if the learner gave it a place there, else in the mesh."""
        learner, _ = self._station.learner()
        count, have = len(held.chunks.spans), held.chunks.have()
        if (routes := self._routes.get(held.head.version)) is not None:
            return TreeCourier(count=count, learner=learner, routes=routes, held=have, random=self._station.random)
        leaf = self._is_leaf(self._station.me)
        return Relay(learner, count, held.table.chunk_bytes, leaf=leaf, now=time.monotonic(), have=have)

    async def _table(self, announced: _Announced, store: VersionStore) -> tuple[bytes, ChunkTable]:
        """The table as it came in parts; if that is not the signed one, as the learner or a peer has it."""
        head, layout = announced.head, store.layout
        assert layout is not None
        if (data := announced.parts.whole()) is not None:
            try:
                return data, await asyncio.to_thread(open_table, data, head, layout)
            except ProtocolError:
                self._transfers.rejected["table"] += 1
        path = f"/v1/objects/{head.table_digest.hex()}"
        for peer in [*self._sources(), *self._learner()]:
            try:
                data = await peer.get(path, cap_bytes=head.table_bytes, timeout_s=FETCH_S)
                table = await asyncio.to_thread(open_table, data, head, layout)
            except (PeerUnreachable, ProtocolError):
                continue
            for liar in announced.parts.liars(data):
                if (link := self._transfers.links.get(liar)) is not None:
                    self._transfers.reject(link, "table")
            return data, table
        raise PeerUnreachable("nobody gives its chunk table")

    async def _with_layout(self, head: Head) -> VersionStore:
        """The store with the head's layout, fetched if it is not here. OtherModel if there was another one."""
        assert self.store is not None
        if self.store.layout_digest == head.layout_digest:
            return self.store
        if self.store.layout is not None and self._target is not None:
            raise OtherModel("the learner now trains another model")
        path, cap = f"/v1/objects/{head.layout_digest.hex()}", LAYOUT_BYTES
        for peer in [*self._sources(), *self._learner()]:
            try:
                data = await peer.get(path, cap_bytes=cap, timeout_s=FETCH_S)
                layout = await asyncio.to_thread(open_layout, data, head)
                break
            except (PeerUnreachable, ProtocolError):
                continue
        else:
            raise PeerUnreachable("nobody gives the layout of the model")
        if self.weights is not None:
            self.weights.close()
            self.weights = None
        await asyncio.to_thread(self.store.set_layout, data, layout)
        self.weights = await asyncio.to_thread(open_weights, self.store)
        return self.store

    def _is_within_reach(self, held: HeldVersion) -> bool:
        """Whether the version can be applied once it is here: else its deltas are of no use to this node."""
        base = held.head.base
        return base is None or base == self.version or base in self._transfers.active or not needs_base(held.table)

    def _retire(self, newer: HeldVersion) -> None:
        """Take part no more in what the newer version makes needless: its elders that are complete, all but the last,
        and those that are not, if it needs no base."""
        active = self._transfers.active
        elders = [v for v in active if v < newer.head.version]
        for version in elders:
            whole = active[version].completed_at is not None
            if (whole and version != elders[-1]) or (not whole and not needs_base(newer.table)):
                self._transfers.close(version)
        while len(active := self._transfers.active) >= MAX_ACTIVE:
            self._transfers.close(min(active))

    # -- the map ---------------------------------------------------------------------------------------------

    def _on_complete(self, transfer: Transfer) -> None:
        self._note_time(transfer.held.head.version, "complete_s")
        self._news.set()

    async def _keep_up(self) -> None:
        """Apply what is here, in order; fetch what cannot come by itself."""
        while True:
            self._news.clear()
            if not self._is_behind():
                await self._news.wait()
            elif (held := self._next_to_apply()) is not None:
                await self._apply(held)
            elif self._comes_by_itself():
                await self._news.wait()
            else:
                await self._fetch_rest()

    async def _apply(self, held: HeldVersion) -> None:
        assert self.weights is not None
        assert self.store is not None
        try:
            async with self._steady:
                await asyncio.to_thread(self.weights.apply, held, self._pool)
        except ProtocolError as fault:
            self._say(f"version {held.head.version} cannot be applied, fetching it anew: {fault}")
            self._transfers.close(held.head.version)
            return
        self._behind_since = None
        await asyncio.to_thread(self.store.prune)
        await self._tell()

    def _next_to_apply(self) -> HeldVersion | None:
        """The newest version that is here and can be made of the map."""
        assert self.weights is not None
        for transfer in reversed(list(self._transfers.active.values())):
            held = transfer.held
            newer = self.version is None or held.head.version > self.version
            if newer and held.chunks.complete and self.weights.can_become(held):
                return held
        return None

    def _comes_by_itself(self) -> bool:
        """Some version under way is incomplete, and everything between it and the map is under way too."""
        for transfer in self._transfers.active.values():
            base = transfer.held.head.base
            reachable = base is None or base == self.version or base in self._transfers.active
            if not transfer.held.chunks.complete and reachable:
                return True
        return False

    async def _fetch_rest(self) -> None:
        """Ask those who are up to date, and the learner once they have had time to become so."""
        assert self.weights is not None
        assert self.store is not None
        assert self._target is not None
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        sources = self._sources()
        # A node that has just been linked does not know yet whom it could ask.
        may_come = sources or not self._roster.members
        patient = may_come and now - self._behind_since < PATIENCE_S
        learner = self._learner()
        try:
            async with self._steady:
                await catch_up(
                    self.store,
                    self.weights,
                    self._target,
                    sources,
                    pool=self._pool,
                    learner=learner[0] if learner and not patient else None,
                    base=self._base,
                    meter=self._station.download.flow,
                )
            self._behind_since = None
            self._note_time(self._target.head.version, "complete_s")
        except (PeerUnreachable, ProtocolError) as fault:
            if not patient:
                self._say(f"cannot catch up with version {self._target.head.version} yet: {fault}")
            await asyncio.sleep(RETRY_S)
        await self._tell()

    def _sources(self) -> list[Peer]:
        """Publics to ask, in an order of chance."""
        members = [m for m in self._roster.members if not m.is_leaf and m.node != self._station.me]
        self._station.random.shuffle(members)
        return [self._station.peer_at(NodeId(m.node), m.addresses[0]) for m in members]

    def _learner(self) -> list[Peer]:
        node, addresses = self._station.learner()
        return [self._station.peer_at(node, address) for address in addresses[:1]]

    # -- parts -----------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        self._news.set()
        async with self._changed:
            self._changed.notify_all()

    def _is_behind(self) -> bool:
        return self._target is not None and self.version != self._target.head.version

    def _newer_map(self, than: VersionId | None) -> SignedVersion | None:
        current = self.weights.current if self.weights else None
        return current if current is not None and self._is_newer(current, than) else None

    @staticmethod
    def _is_newer(found: SignedVersion, than: VersionId | None) -> bool:
        return than is None or found.head.version > than

    def _note_time(self, version: VersionId, what: str) -> None:
        times = self._times.setdefault(version, {"announced_s": None, "complete_s": None})
        times[what] = times[what] or time.monotonic()
        while len(self._times) > MAX_TIMES:
            del self._times[min(self._times)]
