"""Keeping a node's weight map up to date: what has come is applied, what cannot come by itself is fetched, and the
disk's copy of a map in memory follows now and then.

A receiver that is behind asks peers for stored deltas or full regions (catchup.py), and the learner last.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from swarm.broadcast.coding import in_thread
from swarm.broadcast.receiver.catchup import CatchUp
from swarm.broadcast.receiver.neighbours import Neighbours
from swarm.broadcast.receiver.progress import VersionProgress
from swarm.broadcast.store.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap, open_weights
from swarm.broadcast.transfers import Transfers
from swarm.broadcast.version.manifest import Layout, needs_base
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.net.links import Station
from swarm.types import VersionId

PATIENCE_S = 10.0
"""How long a node that is behind waits before it burdens the learner, so that its peers can get up to date; and how
long it waits for the next chunk before it fetches the rest, because a killed learner deals no more chunks."""

RETRY_S = 1.0  # Pause between two tries to catch up
COPY_AGAIN_S = 60.0  # Pause after a copy that did not succeed: damage is mended first, by the next version or a recheck


class Upkeep:
    """The map under `directory`, and the newest version that was opened: its `target`. `place` gives a directory in
    memory for a map of so many bytes, or None."""

    def __init__(
        self,
        directory: Path,
        learner_key: bytes,
        station: Station,
        transfers: Transfers,
        neighbours: Neighbours,
        *,
        pool: Executor,
        say: Callable[[str], None],
        place: Callable[[int], Path | None],
    ) -> None:
        self._directory = directory
        self._learner_key = learner_key
        self._station = station
        self._transfers = transfers
        self._neighbours = neighbours
        self._pool = pool
        self._say = say
        self._place = place
        self.progress = VersionProgress(transfers)
        self.store: VersionStore | None = None
        self.weights: WeightMap | None = None
        self.target: HeldVersion | None = None
        self.news = asyncio.Event()
        """Set when there may be something to do."""
        self._changed = asyncio.Condition()
        self._behind_since: float | None = None
        self._said = ""  # why it cannot catch up: a learner may be away for hours, and this node tries every second
        self._steady = asyncio.Lock()
        self._filling = asyncio.Lock()  # Held while a copy of the map is written, or regions that no encoding here has

    async def open(self) -> None:
        """Load what a former process left."""
        self.store = await in_thread(VersionStore, self._directory, self._learner_key)
        if self.store.layout is not None:
            self.weights = await self._open_weights(self.store, self.store.layout)

    async def begin(self, data: bytes, layout: Layout) -> None:
        """Begin with another layout, whose exact bytes are `data`."""
        assert self.store is not None
        self.close()
        self.weights = None
        await in_thread(self.store.set_layout, data, layout)
        self.weights = await self._open_weights(self.store, layout)

    def close(self) -> None:
        if self.weights is not None:
            self.weights.close()

    async def run(self) -> None:
        """Apply what is here, in order. Fetch what cannot come by itself."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_up())
            group.create_task(self._keep_copy())

    # -- what the roles ask ----------------------------------------------------------------------------------

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
        async with self.filling():
            damaged = await in_thread(self.weights.recheck) if self.weights else 0
        self._say(f"{damaged} regions of the weights on disk are damaged{': fetching them again' if damaged else ''}")
        self.news.set()
        return damaged

    @property
    def version(self) -> VersionId | None:
        return self.weights.version if self.weights else None

    def is_news(self, version: VersionId) -> bool:
        """Return whether a version is newer than the newest one that was opened."""
        if self.target is not None:
            return version > self.target.head.version
        # After a restart somebody may offer less than this node held.
        current = self.weights.current if self.weights else None
        return current is None or version >= current.head.version

    def base_comes(self, base: VersionId | None) -> bool:
        """Return whether a version's base is in the map or under way, or it has none."""
        return base is None or base == self.version or base in self._transfers.active

    @asynccontextmanager
    async def filling(self) -> AsyncIterator[None]:
        """Let nobody else change or read the map within the block."""
        async with self._steady, self._filling:
            yield

    def tell_learner(self) -> None:
        """Tell the learner what this node has, however it got it: the learner waits for no node that has a version."""
        if self.store is not None:
            self.progress.tell(self._station.learner()[0], self.store, self.version)

    async def tell(self) -> None:
        """Tell all who wait for news of the map, the learner too."""
        self.tell_learner()
        self.news.set()
        async with self._changed:
            self._changed.notify_all()

    # -- the map ---------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        while True:
            self.news.clear()
            if not self._is_behind():
                await self.news.wait()
            elif (held := self._next_to_apply()) is not None:
                await self._apply(held)
            elif self._comes_by_itself() and await self.progress.goes_on(self.news, PATIENCE_S):
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
        self.progress.note_time(held.head.version, "applied_s")
        held.chunks.rest()
        if before is None or held.head.version > before:
            # Else the map is only what it was before a catch-up that failed, and the learner has to be asked.
            self._behind_since = None
        await self._prune()
        await self.tell()

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
            not one.chunks.complete and (self.base_comes(one.head.base) or not needs_base(one.table))
            for one in self._under_way()
        )

    def _under_way(self) -> list[HeldVersion]:
        return [one.held for one in self._transfers.active.values() if isinstance(one.held, HeldVersion)]

    async def _fetch_rest(self) -> None:
        """Ask peers that are up to date, and the learner once they have had time to get there."""
        assert self.weights is not None
        assert self.store is not None
        assert self.target is not None
        target = self.target  # A newer one may be opened meanwhile
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        sources = self._neighbours.publics()
        # A node that has only just been linked does not know yet whom it could ask.
        patient = (sources or not self._neighbours.none_is_public()) and now - self._behind_since < PATIENCE_S
        try:
            async with self.filling():
                await CatchUp(
                    store=self.store,
                    weights=self.weights,
                    sources=sources,
                    learner=self._neighbours.learner(),
                    patient=patient,
                    pool=self._pool,
                    meter=self._station.download.flow,
                ).run(target)
            self._behind_since = None
            self.progress.note_time(target.head.version, "complete_s")
            self.progress.note_time(target.head.version, "applied_s")
        except (PeerUnreachable, ProtocolError) as fault:
            words = f"cannot catch up with version {target.head.version} yet: {fault}"
            if not patient and words != self._said:
                self._said = words
                self._say(words)
            await asyncio.sleep(RETRY_S)
        await self.tell()

    async def _open_weights(self, store: VersionStore, layout: Layout) -> WeightMap:
        memory = await in_thread(self._place, layout.total_bytes)
        return await in_thread(open_weights, store, self._pool, memory)

    def _is_behind(self) -> bool:
        return self.target is not None and self.version != self.target.head.version

    def _newer_map(self, than: VersionId | None) -> SignedVersion | None:
        current = self.weights.current if self.weights else None
        newer = current is not None and (than is None or current.head.version > than)
        return current if newer else None
