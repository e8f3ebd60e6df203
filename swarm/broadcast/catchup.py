"""How a node that is behind, new or damaged gets a version over HTTP: by stored deltas or by full regions.

Deltas are the chunks of the versions in between, applied one after the other; they stay in the store, so this node can
give them to others. Full regions are encoded by a peer for this node alone and proven by the decoded digest of the
signed table. The way that takes fewer bytes is chosen; tables state the sizes of deltas. If the base of a few regions
is damaged, those are fetched in full and the rest is applied. Pieces come from several peers at once, with several
requests in flight; a peer that fails or lies is not asked again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from swarm.broadcast.coding import in_thread
from swarm.broadcast.serving import Meter
from swarm.broadcast.store.base_model import BaseModel, take_from_base
from swarm.broadcast.store.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap
from swarm.broadcast.version.codec import FULL_RATIO
from swarm.broadcast.version.manifest import (
    DELTAS,
    HEAD_BYTES,
    ITEM_BYTES,
    FullRegion,
    needs_base,
    open_head,
    open_table,
)
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.net.client import Busy, Gone, Peer
from swarm.net.wire import decode
from swarm.types import VersionId

REQUESTS_A_PEER = 4
"""Requests in flight to one peer: pieces of 1 MiB cover 300 ms at 100 Mbit/s. A client opens twice as many."""

REQUESTS_IN_ALL = 16  # Pieces in memory at once: 64 MiB at most
FETCH_S = 60.0  # Time limit for one piece: 4 MiB at 0.6 Mbit/s
LATE_S = 2.0
LATE_RATIO = 3.0
"""A piece under way for longer than this, and than three times the average, is asked of another peer too."""

GONE_IN_A_ROW = 4  # A peer that lacks this many pieces in a row has moved on to another version
BUSY_IN_A_ROW = 10  # A peer that is busy this often in a row is given up


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """One GET. `take` is called with the body in a thread and says whether it is what was signed."""

    path: str
    expected_bytes: int
    cap_bytes: int
    take: Callable[[bytes], bool]


class Download:
    """Pieces to fetch from one set of peers, and what is left of them from another."""

    def __init__(self, pieces: Sequence[Piece], pool: Executor, *, meter: Meter | None = None) -> None:
        self.faults: Counter[str] = Counter()
        self.blamed: list[Peer] = []
        self.fetched_bytes = 0
        self._pool = pool
        self._meter = meter
        self._waiting = deque(pieces)
        self._asked: dict[Piece, tuple[float, int]] = {}
        self._left = set(pieces)
        self._seconds = 0.0
        self._taken = 0
        self._news = asyncio.Event()

    @property
    def left(self) -> int:
        return len(self._left)

    async def run(self, peers: Sequence[Peer]) -> bool:
        """True once every piece is taken; False if no peer is left that gives the rest."""
        if not peers:
            return not self._left
        each = min(REQUESTS_A_PEER, max(1, REQUESTS_IN_ALL // len(peers)))
        tasks = [
            asyncio.create_task(self._work(state))
            for state in [_PeerState(peer) for peer in peers[:REQUESTS_IN_ALL]]
            for _ in range(each)
        ]
        try:
            pending = set(tasks)
            while pending and self._left:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return not self._left

    async def _work(self, state: _PeerState) -> None:
        while not state.left and (piece := await self._next(state)) is not None:
            try:
                reason = await self._fetch(state, piece)
            finally:
                self._put_back(piece)
            if reason is not None and not state.left:
                state.left = True
                self.faults[reason] += 1
                self.blamed.append(state.peer)

    async def _next(self, state: _PeerState) -> Piece | None:
        """A piece that nobody was asked for yet, or one that is late; None once all are taken."""
        loop = asyncio.get_running_loop()
        while self._left and not state.left:
            while self._waiting:
                piece = self._waiting.popleft()
                if piece in self._left:
                    self._asked[piece] = (loop.time(), 1)
                    return piece
            late_s = max(LATE_S, LATE_RATIO * self._seconds / max(1, self._taken))
            for piece, (since, askers) in self._asked.items():
                if askers == 1 and loop.time() - since > late_s:
                    self._asked[piece] = (since, 2)
                    return piece
            self._news.clear()
            try:
                async with asyncio.timeout(LATE_S / 2):
                    await self._news.wait()
            except TimeoutError:
                pass
        return None

    def _put_back(self, piece: Piece) -> None:
        """A piece that did not come waits again, unless another peer is being asked for it."""
        asked = self._asked.pop(piece, None)
        if piece in self._left:
            if asked is not None and asked[1] > 1:
                self._asked[piece] = (asked[0], asked[1] - 1)
            else:
                self._waiting.append(piece)
        self._news.set()

    async def _fetch(self, state: _PeerState, piece: Piece) -> str | None:
        """Ask for a piece and take it. Returns why the peer is to be given up, or None."""
        loop = asyncio.get_running_loop()
        if self._meter is not None:
            await self._meter(piece.expected_bytes)
        began = loop.time()
        try:
            body = await state.peer.get(piece.path, cap_bytes=piece.cap_bytes, timeout_s=FETCH_S)
        except Gone:
            state.gone += 1
            return "gone" if state.gone >= GONE_IN_A_ROW else None
        except Busy as busy:
            state.busy += 1
            await asyncio.sleep(busy.retry_after_s)
            return "busy" if state.busy >= BUSY_IN_A_ROW else None
        except ProtocolError:
            return "refused"
        except PeerUnreachable:
            return "unreachable"
        self.fetched_bytes += len(body)
        if piece in self._left and not await in_thread(piece.take, body, pool=self._pool):
            return "lied"
        self._left.discard(piece)
        state.gone = state.busy = 0
        self._seconds += loop.time() - began
        self._taken += 1
        return None


@dataclass(slots=True)
class _PeerState:
    peer: Peer
    left: bool = False
    gone: int = 0
    busy: int = 0


CHUNKS_WORTH = 1.1
"""Chunks may take a tenth more bytes than full regions: they can be given to others, and nobody has to encode them."""

FRAMING_BYTES = 64  # An answer with a region states the codec before the encoding
MAX_DELTAS = 8  # Deltas applied in sequence: peers keep four versions and those in use


@dataclass(slots=True, kw_only=True)
class CaughtUp:
    """What a catch-up took. `blamed` are the peers that failed or lied; `faults` counts why."""

    way: Literal["nothing", "deltas", "regions"] = "nothing"
    fetched_bytes: int = 0
    from_base_bytes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    blamed: list[Peer] = field(default_factory=list)


async def catch_up(
    store: VersionStore,
    weights: WeightMap,
    target: SignedVersion,
    sources: Sequence[Peer],
    *,
    pool: Executor,
    learner: Peer | None = None,
    base: BaseModel | None = None,
    meter: Meter | None = None,
) -> CaughtUp:
    """Make the map hold `target`. Nothing else may change the map meanwhile.

    The sources are asked in parallel, the learner only for what none of them gives. PeerUnreachable if nobody gives
    the rest: what came is kept, and the next call goes on from there. `meter` is awaited before each request.
    """
    return await _CatchUp(store, weights, list(sources), learner, pool, meter).run(target, base)


@dataclass(slots=True)
class _CatchUp:
    _store: VersionStore
    _weights: WeightMap
    _sources: list[Peer]
    _learner: Peer | None
    _pool: Executor
    _meter: Meter | None
    _report: CaughtUp = field(default_factory=CaughtUp)

    async def run(self, target: SignedVersion, base: BaseModel | None) -> CaughtUp:
        if self._weights.version == target.head.version:
            return self._report
        if base is not None and self._weights.last_whole is None:
            await in_thread(self._weights.begin_fill, target)
            self._report.from_base_bytes = await in_thread(take_from_base, base, self._weights, target.table)
        full_bytes = self._full_bytes(target, self._weights.lacking(target.table))
        row = await self._deltas(target, int(CHUNKS_WORTH * full_bytes))
        if row is not None:
            self._report.way = "deltas"
            try:
                await self._take_deltas(row)
            except (PeerUnreachable, ProtocolError):
                # The others pruned a version meanwhile, or one is damaged here: full regions need no base.
                row = None
        if row is None:
            self._report.way = "regions"
            await in_thread(self._weights.begin_fill, target)
            await self._fetch_regions(target, self._weights.lacking(target.table))
            await in_thread(self._weights.finish)
        return self._report

    # -- deltas ----------------------------------------------------------------------------------------------

    async def _deltas(self, target: SignedVersion, limit_bytes: int) -> list[SignedVersion] | None:
        """The versions to apply in sequence, the oldest first; None if that takes more than `limit_bytes`."""
        row = [target]
        cost = self._chunk_bytes(target)
        while needs_base(row[0].table) and row[0].head.base != self._weights.last_whole:
            older = row[0].head.base
            assert older is not None
            whole = self._weights.last_whole
            if whole is None or older < whole or len(row) == MAX_DELTAS or cost > limit_bytes:
                return None
            found = self._store.find(older) or await self._signed(older)
            if found is None:
                return None
            row.insert(0, found)
            cost += self._chunk_bytes(found)
        cost += self._full_bytes(row[0], self._weights.missing_base(row[0]))
        return row if cost <= limit_bytes else None

    async def _take_deltas(self, row: list[SignedVersion]) -> None:
        for version in row:
            held = await in_thread(self._store.begin, version)
            await self._fetch_chunks(held)
            if damaged := self._weights.missing_base(held):
                await in_thread(self._weights.begin_fill, held)
                await self._fetch_regions(held, damaged)
            try:
                await in_thread(self._weights.apply, held, self._pool)
            except ProtocolError:
                # If a disk or a second receiver spoiled a chunk, it must not be given to others either.
                await in_thread(held.chunks.recheck)
                raise

    async def _signed(self, version: VersionId) -> SignedVersion | None:
        for peer in self._everybody():
            try:
                return await self._signed_from(peer, version)
            except (ProtocolError, PeerUnreachable):
                continue
        return None

    async def _signed_from(self, peer: Peer, version: VersionId) -> SignedVersion:
        sealed = await peer.get(f"/v1/versions/{version}/head", cap_bytes=HEAD_BYTES, timeout_s=FETCH_S)
        head = open_head(sealed, self._store.learner_key)
        if head.version != version or head.layout_digest != self._store.layout_digest:
            raise ProtocolError(f"asked for the head of {version}, got that of {head.version}")
        path = f"/v1/objects/{head.table_digest.hex()}"
        data = await peer.get(path, cap_bytes=head.table_bytes, timeout_s=FETCH_S)
        table = await in_thread(open_table, data, head, self._weights.layout)
        return SignedVersion(head=head, sealed_head=sealed, table=table, table_bytes=data)

    async def _fetch_chunks(self, held: HeldVersion) -> None:
        version, chunks = held.head.version, held.chunks

        def take(index: int, body: bytes) -> bool:
            self._store.find(version)  # keeps it
            return chunks.put(index, body)

        pieces = [
            Piece(
                path=f"/v1/versions/{version}/chunks/{i}",
                expected_bytes=span.nbytes,
                cap_bytes=span.nbytes,
                take=partial(take, i),
            )
            for i, span in enumerate(chunks.spans)
            if not chunks.has(i)
        ]
        await self._fetch(pieces, f"chunks of version {version}")

    # -- full regions ----------------------------------------------------------------------------------------

    async def _fetch_regions(self, target: SignedVersion, indices: list[int]) -> None:
        version, weights = target.head.version, self._weights

        def take(index: int, body: bytes) -> bool:
            try:
                region = decode(body, FullRegion, cap_bytes=len(body))
            except ProtocolError:
                return False
            return weights.put_region(index, region.codec, region.encoded)

        pieces = [
            Piece(
                path=f"/v1/versions/{version}/regions/{i}",
                expected_bytes=self._full_region_bytes(target, i),
                cap_bytes=weights.regions[i].nbytes + FRAMING_BYTES,
                take=partial(take, i),
            )
            for i in indices
        ]
        await self._fetch(pieces, f"regions of version {version}")

    async def _fetch(self, pieces: list[Piece], what: str) -> None:
        download = Download(pieces, self._pool, meter=self._meter)
        try:
            done = await download.run(self._sources)
            if not done and self._learner is not None:
                done = await download.run([self._learner])
        finally:
            self._report.fetched_bytes += download.fetched_bytes
            self._report.faults += download.faults
            self._report.blamed += download.blamed
            self._sources = [peer for peer in self._sources if peer not in download.blamed]
        if not done:
            raise PeerUnreachable(f"nobody gives the last {download.left} {what}")

    def _full_bytes(self, version: SignedVersion, indices: Sequence[int]) -> int:
        return sum(self._full_region_bytes(version, index) for index in indices)

    def _full_region_bytes(self, version: SignedVersion, index: int) -> int:
        """The full encoding's size, as the table states it or, for a delta, estimated."""
        entry = version.table.regions[index]
        if entry.codec not in DELTAS:
            return entry.encoded_bytes
        nbytes = self._weights.regions[index].nbytes
        return int(FULL_RATIO * nbytes) if ITEM_BYTES[self._weights.dtypes[index]] == 2 else nbytes

    def _chunk_bytes(self, version: SignedVersion) -> int:
        held = self._store.find(version.head.version)
        if held is None:
            return version.table.encoded_bytes
        return sum(span.nbytes for i, span in enumerate(held.chunks.spans) if not held.chunks.has(i))

    def _everybody(self) -> Iterator[Peer]:
        yield from self._sources
        if self._learner is not None:
            yield self._learner
