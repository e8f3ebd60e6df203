"""How a node that is behind, new or damaged gets a version over HTTP: by stored deltas or by full regions.

Deltas are the chunks of the versions in between, applied one after the other. They stay in the store, so this node can
give them to others. A peer encodes full regions for this node alone; the decoded digests in the signed table prove
them. The node takes the way that needs fewer bytes; tables state the sizes of deltas. If the base of a few regions is
damaged, it fetches those in full and applies the rest. It fetches pieces from several peers at once, with several
requests in flight, and does not ask a peer again that failed or lied.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from swarm.broadcast.coding import in_thread
from swarm.broadcast.receiver.neighbours import first_of
from swarm.broadcast.store.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap
from swarm.broadcast.version.codec import FULL_RATIO
from swarm.broadcast.version.manifest import (
    HEAD_BYTES,
    ITEM_BYTES,
    WHOLE,
    FullRegion,
    needs_base,
    open_head,
    open_table,
)
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.net.client import Busy, Gone, HttpPeer, Progress
from swarm.types import VersionId
from swarm.wire import decode

REQUESTS_A_PEER = 4
"""Requests in flight to one peer: four pieces of 1 MiB cover 300 ms at 100 Mbit/s. A client opens twice as many."""

REQUESTS_IN_ALL = 16  # To peers: with the learner's, 20 pieces are in memory at once, 80 MiB at most
FETCH_S = 60.0  # Time limit for one piece: 4 MiB at 0.6 Mbit/s
LATE_S, LATE_RATIO, FIRST_S = 2.0, 3.0, 15.0
"""A piece is late if nothing of it came for LATE_S, or if it takes three times the average so far (FIRST_S before the
first): it is asked of another peer too, and of the learner while all are late."""

GONE_IN_A_ROW = 4  # A peer that lacks this many pieces in a row has moved on to another version
BUSY_IN_A_ROW = 10  # A peer that is busy this often in a row is given up
MAX_BUSY_S = 3.0  # Longest pause that a busy peer is granted: with BUSY_IN_A_ROW it holds a request for 30 s


Meter = Callable[[int], Awaitable[None]]
"""Waits until that many bytes may cross the line: the node's download cap."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """One GET. `take` gets the body, in a thread, and says whether it is what was signed."""

    path: str
    expected_bytes: int
    cap_bytes: int
    take: Callable[[bytes], bool]


@dataclass(slots=True, eq=False)
class CatchupSource:
    """A peer that is asked, with the number of `gone` and `busy` answers since it last gave a piece."""

    peer: HttpPeer
    gone: int = 0
    busy: int = 0


@dataclass(slots=True, eq=False)
class CatchupRequest:
    """`began_at` is when it was asked for, `moved_at` when something of it came last; infinite while this node itself
    holds it up."""

    source: CatchupSource
    piece: Piece
    began_at: float = math.inf
    moved_at: float = math.inf

    def moved(self, size: int) -> None:
        self.moved_at = asyncio.get_running_loop().time()


class Download:
    """Pieces to fetch from peers, and what these do not give in time from the learner."""

    def __init__(self, pieces: Sequence[Piece], pool: Executor, *, meter: Meter | None = None) -> None:
        self.failed: list[HttpPeer] = []
        self.left = set(pieces)
        self._pool = pool
        self._meter = meter
        self._waiting = deque(pieces)
        self._requests: dict[asyncio.Task[bool], CatchupRequest] = {}
        self._seconds = 0.0
        self._taken = 0
        self.asks_learner = False

    async def run(self, peers: Sequence[HttpPeer], learner: Sequence[HttpPeer], *, patient: bool) -> bool:
        """Return True once every piece is taken, False if no peer is left that gives the rest. The learner is asked too
        while all peers are silent and, unless `patient`, once they give nothing more."""
        each = min(REQUESTS_A_PEER, max(1, REQUESTS_IN_ALL // max(1, len(peers))))
        free = deque([CatchupSource(peer) for peer in peers[:REQUESTS_IN_ALL]] * each)
        helping = False
        try:
            while self.left:
                self._ask(free)
                is_silent = all(self._is_late(request) for request in self._requests.values())
                if learner and not helping and (is_silent if self._requests else not patient):
                    free.extend([CatchupSource(peer) for peer in learner] * REQUESTS_A_PEER)
                    helping = self.asks_learner = True
                    continue
                if not self._requests:
                    return False
                done, _ = await asyncio.wait(self._requests, timeout=LATE_S / 2, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    source = self._end(task)
                    if source.peer not in learner:
                        free.append(source)
                        helping = helping and not (task.result() and source.gone == source.busy == 0)
                    elif helping:
                        free.append(source)
                if not helping:
                    free = deque(source for source in free if source.peer not in learner)
        finally:
            for task in self._requests:
                task.cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)
            # They kept these pieces until another peer gave them.
            self.failed.extend(request.source.peer for request in self._requests.values() if self._is_late(request))
        return True

    def _ask(self, free: deque[CatchupSource]) -> None:
        """Give every free source something to do, if there is anything."""
        for _ in range(len(free)):
            source = free.popleft()
            if source.peer in self.failed:
                continue
            if (piece := self._next(source)) is None:
                free.append(source)
                continue
            request = CatchupRequest(source, piece)
            self._requests[asyncio.create_task(self._fetch(request))] = request

    def _next(self, source: CatchupSource) -> Piece | None:
        """Return a piece that nobody is asked for, or one that all who are asked for it, other peers, are late with."""
        while self._waiting:
            if (piece := self._waiting.popleft()) in self.left:
                return piece
        keeping = [r.piece for r in self._requests.values() if r.source.peer is source.peer or not self._is_late(r)]
        late = (r.piece for r in self._requests.values() if r.piece in self.left and r.piece not in keeping)
        return next(late, None)

    def _is_late(self, request: CatchupRequest) -> bool:
        now, usual_s = asyncio.get_running_loop().time(), FIRST_S
        if self._taken:
            usual_s = max(LATE_S, LATE_RATIO * self._seconds / self._taken)
        return now - request.moved_at > LATE_S or now - request.began_at > usual_s

    def _end(self, task: asyncio.Task[bool]) -> CatchupSource:
        request = self._requests.pop(task)
        if not task.result():
            self.failed.append(request.source.peer)
        if request.piece in self.left and all(other.piece is not request.piece for other in self._requests.values()):
            self._waiting.append(request.piece)
        return request.source

    async def _fetch(self, request: CatchupRequest) -> bool:
        """Ask for a piece and take it. Return False if the peer must not be asked again."""
        source, piece = request.source, request.piece
        if self._meter is not None:
            await self._meter(piece.expected_bytes)
        request.began_at = request.moved_at = asyncio.get_running_loop().time()
        try:
            body = await source.peer.get(
                piece.path, cap_bytes=piece.cap_bytes, timeout_s=FETCH_S, progress=request.moved
            )
        except Gone:
            source.gone += 1
            return source.gone < GONE_IN_A_ROW
        except Busy as busy:
            source.busy += 1
            await asyncio.sleep(min(busy.retry_after_s, MAX_BUSY_S))
            return source.busy < BUSY_IN_A_ROW
        except (ProtocolError, PeerUnreachable):
            return False
        took_s = asyncio.get_running_loop().time() - request.began_at
        request.began_at = request.moved_at = math.inf
        if piece in self.left and not await in_thread(piece.take, body, pool=self._pool):
            return False
        self.left.discard(piece)
        source.gone = source.busy = 0
        self._seconds += took_s
        self._taken += 1
        return True


CHUNKS_WORTH = 1.1
"""Chunks may take a tenth more bytes than full regions: others can have them too, and nobody has to encode them."""

FRAMING_BYTES = 64  # An answer with a region states the codec before the encoding
MAX_DELTAS = 8  # Deltas applied in sequence: peers keep four versions and those in use


@dataclass(slots=True, kw_only=True)
class CatchUp:
    """One try to make the map hold a version. Nothing else may change the map meanwhile.

    The sources are asked in parallel, the `learner` only while they are silent and, unless `patient`, for what none of
    them gives. `meter` is awaited before each request.
    """

    store: VersionStore
    weights: WeightMap
    sources: Sequence[HttpPeer]
    learner: Sequence[HttpPeer] = ()
    patient: bool = False
    pool: Executor
    meter: Meter | None = None

    async def run(self, target: SignedVersion) -> None:
        """Raise PeerUnreachable if nobody gives the rest: what came is kept, and the next try goes on from there."""
        if self.weights.version == target.version:
            return
        full_bytes = self._full_bytes(target, self.weights.lacking(target.table))
        chain = await self._deltas(target, int(CHUNKS_WORTH * full_bytes))
        if chain is not None:
            try:
                return await self._take_deltas(chain)
            except (PeerUnreachable, ProtocolError):
                pass  # The others pruned a version meanwhile, or one is damaged here: full regions need no base.
        await in_thread(self.weights.begin_fill, target)
        await self._fetch_regions(target, self.weights.lacking(target.table))
        await in_thread(self.weights.finish)

    # -- deltas ----------------------------------------------------------------------------------------------

    async def _deltas(self, target: SignedVersion, limit_bytes: int) -> list[SignedVersion] | None:
        """Return the versions to apply in sequence, oldest first, or None if they take more than `limit_bytes`."""
        chain = [target]
        cost = self._chunk_bytes(target)
        while needs_base(chain[0].table) and chain[0].head.base != self.weights.last_whole:
            older = chain[0].head.base
            assert older is not None
            whole = self.weights.last_whole
            if whole is None or older < whole or len(chain) == MAX_DELTAS or cost > limit_bytes:
                return None
            found: SignedVersion | None = self.store.find(older)
            if found is None:
                found = await first_of([*self.sources, *self.learner], partial(self._signed_from, older))
            if found is None:
                return None
            chain.insert(0, found)
            cost += self._chunk_bytes(found)
        cost += self._full_bytes(chain[0], self.weights.missing_base(chain[0]))
        return chain if cost <= limit_bytes else None

    async def _take_deltas(self, chain: list[SignedVersion]) -> None:
        for version in chain:
            held = await in_thread(self.store.begin, version)
            await self._fetch_chunks(held)
            if damaged := self.weights.missing_base(held):
                await in_thread(self.weights.begin_fill, held)
                await self._fetch_regions(held, damaged)
            try:
                await in_thread(self.weights.apply, held, self.pool)
            except ProtocolError:
                # If a disk or a second receiver spoiled a chunk, it must not be given to others either.
                await in_thread(held.chunks.recheck)
                raise

    async def _signed_from(self, version: VersionId, peer: HttpPeer, progress: Progress) -> SignedVersion:
        sealed = await peer.get(f"/v1/versions/{version}/head", cap_bytes=HEAD_BYTES, timeout_s=FETCH_S)
        head = open_head(sealed, self.store.learner_key)
        if head.version != version or head.layout_digest != self.store.layout_digest:
            raise ProtocolError(f"asked for the head of {version}, got that of {head.version}")
        path = f"/v1/objects/{head.table_digest.hex()}"
        data = await peer.get(path, cap_bytes=head.table_bytes, timeout_s=FETCH_S, progress=progress)
        table = await in_thread(open_table, data, head, self.weights.layout)
        return SignedVersion(head=head, sealed_head=sealed, table=table, table_bytes=data)

    async def _fetch_chunks(self, held: HeldVersion) -> None:
        version, chunks = held.head.version, held.chunks

        def take(index: int, body: bytes) -> bool:
            self.store.find(version)  # keeps it
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
        version, weights = target.head.version, self.weights

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
        download = Download(pieces, self.pool, meter=self.meter)
        try:
            done = await download.run(self.sources, self.learner, patient=self.patient)
        finally:
            self.sources = [peer for peer in self.sources if peer not in download.failed]
            # To be patient with peers that are silent would only make each further piece wait.
            self.patient = self.patient and not download.asks_learner
        if not done:
            raise PeerUnreachable(f"nobody gives the last {len(download.left)} {what}")

    def _full_bytes(self, version: SignedVersion, indices: Sequence[int]) -> int:
        return sum(self._full_region_bytes(version, index) for index in indices)

    def _full_region_bytes(self, version: SignedVersion, index: int) -> int:
        """Return the size of the full encoding, as the table states it or else estimated."""
        entry = version.table.regions[index]
        if entry.codec in WHOLE:
            return entry.encoded_bytes
        nbytes = self.weights.regions[index].nbytes
        return int(FULL_RATIO * nbytes) if ITEM_BYTES[self.weights.dtypes[index]] == 2 else nbytes

    def _chunk_bytes(self, version: SignedVersion) -> int:
        held = self.store.find(version.head.version)
        if held is None:
            return version.table.encoded_bytes
        return sum(span.nbytes for i, span in enumerate(held.chunks.spans) if not held.chunks.has(i))
