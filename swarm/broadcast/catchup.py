"""How a node that is behind, new or damaged comes to hold a version: by stored deltas or by full regions.

Deltas are the chunks of the versions in between, applied one after the other; they stay in the store and can be given
to others. Full regions are encoded by a peer for this node alone and proven by the decoded digest of the signed table.
Whichever is fewer bytes is taken; the sizes of deltas stand in their tables. A version that deltas lead to may lack
the base of a few regions (damage): those are fetched in full and the rest is applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from swarm.broadcast.basemodel import BaseModel, take_from_base
from swarm.broadcast.coding import in_thread
from swarm.broadcast.fetching import FETCH_S, Download, Piece
from swarm.broadcast.manifest import DELTAS, HEAD_BYTES, ITEM_BYTES, FullRegion, needs_base, open_head, open_table
from swarm.broadcast.serving import Meter
from swarm.broadcast.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.weights import WeightMap
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.http import Peer
from swarm.types import VersionId
from swarm.wire import decode

FULL_RATIO = 0.68
"""What the full encoding of 16-bit weights takes of their bytes: the measured figure for N(0, 0.02)."""

CHUNKS_WORTH = 1.1
"""Chunks may be a tenth more bytes than full regions: what came as chunks can be given on, and nobody encodes it."""

FRAMING_BYTES = 64
"""A region's answer is its encoding with the codec's name before it."""

MOST_DELTAS = 8
"""Longest row of deltas: what peers keep is four versions and those in use."""


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
    return await _CatchUp(store, weights, sources, learner, pool, meter).run(target, base)


class _CatchUp:
    def __init__(
        self,
        store: VersionStore,
        weights: WeightMap,
        sources: Sequence[Peer],
        learner: Peer | None,
        pool: Executor,
        meter: Meter | None,
    ) -> None:
        self._store = store
        self._weights = weights
        self._sources = list(sources)
        self._learner = learner
        self._pool = pool
        self._meter = meter
        self._report = CaughtUp()

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
                # Pruned by the others meanwhile, or damaged here: full regions need no base.
                row = None
        if row is None:
            self._report.way = "regions"
            await in_thread(self._weights.begin_fill, target)
            await self._fetch_regions(target, self._weights.lacking(target.table))
            await in_thread(self._weights.finish)
        return self._report

    # -- deltas ----------------------------------------------------------------------------------------------

    async def _deltas(self, target: SignedVersion, limit_bytes: int) -> list[SignedVersion] | None:
        """The versions to apply in sequence, the oldest first; None if there is no such row under `limit_bytes`."""
        row = [target]
        cost = self._chunk_bytes(target)
        while needs_base(row[0].table) and row[0].head.base != self._weights.last_whole:
            older = row[0].head.base
            assert older is not None
            whole = self._weights.last_whole
            if whole is None or older < whole or len(row) == MOST_DELTAS or cost > limit_bytes:
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
            held = await in_thread(
                self._store.begin, version.sealed_head, version.head, version.table_bytes, version.table
            )
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
        """Head and table of a version from whoever has them."""
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
        """What a region of a version takes in full: told by its table, or estimated."""
        entry = version.table.regions[index]
        if entry.codec not in DELTAS:
            return entry.encoded_bytes
        nbytes = self._weights.regions[index].nbytes
        return int(FULL_RATIO * nbytes) if ITEM_BYTES[self._weights.dtypes[index]] == 2 else nbytes

    def _chunk_bytes(self, version: SignedVersion) -> int:
        """What is still to be fetched of a version's chunks."""
        held = self._store.find(version.head.version)
        if held is None:
            return version.table.encoded_bytes
        return sum(span.nbytes for i, span in enumerate(held.chunks.spans) if not held.chunks.has(i))

    def _everybody(self) -> Iterator[Peer]:
        yield from self._sources
        if self._learner is not None:
            yield self._learner
