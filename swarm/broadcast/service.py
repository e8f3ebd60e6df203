"""Publishing on the learner's side and fetching on a sampler's: the shells around manifest, codec and store."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from swarm.broadcast.catchup import catch_up
from swarm.broadcast.manifest import ChunkTable, Head, Layout, open_head, open_layout, open_table
from swarm.broadcast.publishing import PublishedVersions
from swarm.broadcast.serving import VersionServer, parse_version
from swarm.broadcast.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.weights import WeightMap, open_weights
from swarm.errors import ProtocolError
from swarm.http import Peer, binary
from swarm.signing import SigningKey
from swarm.types import VersionId

CHUNK_BYTES = 256 * 1024
"""Unit of transfer: 20 ms of a 100 Mbit/s link. The planner will choose it per version."""

CODING_THREADS = 2
"""Regions coded at a time. Two leave room for the network on a small machine; zstd does 0.4 GB/s on each."""

HEAD_WAIT_S = 20.0
"""Longest time that a request for a newer head is held open."""

FETCH_S = 60.0
"""Time limit for one object or chunk: 4 MiB at 0.6 Mbit/s."""


class BroadcastService:
    """The learner's side: encodes and signs versions off the event loop and serves them."""

    def __init__(self, directory: Path, key: SigningKey) -> None:
        self._directory = directory
        self._key = key
        self._pool = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="codec")
        self._versions: PublishedVersions | None = None
        self._changed = asyncio.Condition()
        self._server = VersionServer(
            lambda: self._versions.store if self._versions else None,
            lambda: self._versions.weights if self._versions else None,
            self._pool,
        )
        self.newest: HeldVersion | None = None

    def set_layout(self, layout: Layout) -> None:
        """The tensors and files of every version to come."""
        self._versions = PublishedVersions(self._directory, self._key, layout)

    async def publish(self, staging: Path, version: VersionId) -> HeldVersion:
        """Encode the staged weights, sign the head and announce it. The staging file must not change meanwhile."""
        assert self._versions is not None
        published = await asyncio.to_thread(self._versions.publish, staging, version, CHUNK_BYTES, self._pool)
        return await self._tell(published)

    async def republish(self, version: VersionId) -> HeldVersion:
        """The newest version's weights once more, as `version`."""
        assert self._versions is not None
        return await self._tell(await asyncio.to_thread(self._versions.republish, version, CHUNK_BYTES, self._pool))

    async def _tell(self, published: HeldVersion) -> HeldVersion:
        async with self._changed:
            self.newest = published
            self._changed.notify_all()
        return published

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/head", self._get_head), *self._server.routes()]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _get_head(self, request: web.Request) -> web.Response:
        """The newest sealed head; with `newer_than`, held open until there is one; empty if none comes."""
        known = request.query.get("newer_than")
        than = parse_version(known) if known else None
        try:
            async with asyncio.timeout(HEAD_WAIT_S), self._changed:
                await self._changed.wait_for(lambda: self._is_newer(than))
        except TimeoutError:
            return binary(b"")
        assert self.newest is not None
        return binary(self.newest.sealed_head)

    def _is_newer(self, than: VersionId | None) -> bool:
        return self.newest is not None and (than is None or self.newest.head.version > than)


class Fetcher:
    """A sampler's side: newest head, layout once, then each version into the weight map."""

    def __init__(self, peer: Peer, learner_key: bytes, directory: Path) -> None:
        self._peer = peer
        self._learner_key = learner_key
        self._directory = directory
        self._pool = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="codec")
        self._store: VersionStore | None = None
        self._weights: WeightMap | None = None

    async def newer_head(self, than: VersionId | None) -> tuple[Head, bytes] | None:
        """The newest head, and as sealed, once it is newer than `than`; None if there was none within HEAD_WAIT_S."""
        query = f"?newer_than={than}" if than else ""
        sealed = await self._peer.get("/v1/head" + query, cap_bytes=4096, timeout_s=HEAD_WAIT_S + 10)
        if not sealed:
            return None
        head = open_head(sealed, self._learner_key)
        if than is not None and head.version <= than:
            raise ProtocolError(f"asked for a version newer than {than}, the learner offers {head.version}")
        return head, sealed

    async def layout(self, head: Head) -> Layout:
        """The layout that `head` names; from then on there is a map."""
        data = await self._object(head.layout_digest, head.layout_bytes)
        layout = await asyncio.to_thread(open_layout, data, head)
        self._store, self._weights = await asyncio.to_thread(self._open, data, layout)
        return layout

    async def fetch(self, head: Head, sealed_head: bytes, layout: Layout) -> tuple[ChunkTable, Path]:
        """Bring the map to this version; its table, and where the weights lie."""
        assert self._store is not None
        assert self._weights is not None
        data = await self._object(head.table_digest, head.table_bytes)
        table = await asyncio.to_thread(open_table, data, head, layout)
        target = SignedVersion(head=head, sealed_head=sealed_head, table=table, table_bytes=data)
        await catch_up(self._store, self._weights, target, (), learner=self._peer, pool=self._pool)
        return table, self._weights.path

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _open(self, layout_bytes: bytes, layout: Layout) -> tuple[VersionStore, WeightMap]:
        store = VersionStore(self._directory, self._learner_key)
        store.set_layout(layout_bytes, layout)
        return store, open_weights(store)

    async def _object(self, wanted: bytes, nbytes: int) -> bytes:
        return await self._peer.get(f"/v1/objects/{wanted.hex()}", cap_bytes=nbytes, timeout_s=FETCH_S)
