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
from swarm.broadcast.manifest import LAYOUT_BYTES, Head, Layout, needs_base, open_head, open_layout, open_table
from swarm.broadcast.relay import Relay
from swarm.broadcast.roster import Roster, whom_to_dial
from swarm.broadcast.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.transfers import HEAD, MAX_ACTIVE, ROSTER, ROSTER_BYTES, TABLE, Transfer, Transfers
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
        self._heads: dict[VersionId, tuple[bytes, Head]] = {}
        self._announced: asyncio.Queue[tuple[bytes, Head, bytes]] = asyncio.Queue(maxsize=MAX_ANNOUNCED)
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
        """Heads, tables and rosters are the learner's to send."""
        if node != self._station.learner()[0]:
            raise ProtocolError("only the learner announces")
        if frame.type == ROSTER:
            self._take_roster(decode(payload, Roster, cap_bytes=ROSTER_BYTES))
        elif frame.type == HEAD:
            head = open_head(payload, self._learner_key)
            if self._target is None or head.version > self._target.head.version:
                self._heads = {head.version: (payload, head)}
        elif frame.type == TABLE and not self._announced.full() and frame.version in self._heads:
            self._announced.put_nowait((*self._heads.pop(frame.version), payload))

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
            sealed, head, table_bytes = await self._announced.get()
            try:
                await self._open(sealed, head, table_bytes)
            except ProtocolError as fault:
                self._say(f"version {head.version} was announced and cannot be taken: {fault}")
            except PeerUnreachable as fault:
                self._say(f"version {head.version} was announced and cannot be taken yet: {fault}")
                await asyncio.sleep(RETRY_S)
                if self._announced.empty():
                    self._announced.put_nowait((sealed, head, table_bytes))

    async def _open(self, sealed: bytes, head: Head, table_bytes: bytes) -> None:
        if self._target is not None and head.version <= self._target.head.version:
            return
        store = await self._with_layout(head)
        assert store.layout is not None
        table = await asyncio.to_thread(open_table, table_bytes, head, store.layout)
        held = await asyncio.to_thread(store.begin, sealed, head, table_bytes, table)
        self._target = held
        self._note_time(head.version, "announced_s")
        self._retire(held)
        if self._is_within_reach(held):
            learner, _ = self._station.learner()
            relay = Relay(
                learner,
                len(held.chunks.spans),
                table.chunk_bytes,
                leaf=self._is_leaf(self._station.me),
                now=time.monotonic(),
                have=held.chunks.have(),
            )
            self._transfers.open(held, relay)
            if held.chunks.complete:
                self._note_time(head.version, "complete_s")
        await self._tell()

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
