"""Publishing on the learner's side and fetching on a sampler's: the shells around manifest, codec and store."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from swarm.broadcast.manifest import ChunkTable, Head, Layout, chunk_spans, open_head, open_layout, open_table
from swarm.broadcast.store import Published, PublishedVersions, WeightMap, read_chunk
from swarm.errors import ProtocolError
from swarm.http import Peer, binary
from swarm.signing import SigningKey
from swarm.types import VersionId
from swarm.wire import Digest

CODING_THREADS = 2
"""Regions coded at a time. Two leave room for the network on a small machine; zstd does 0.4 GB/s on each."""

HEAD_WAIT_S = 20.0
"""Longest time that a request for a newer head is held open."""

CHUNKS_IN_FLIGHT = 4
"""Chunk requests under way at once: 1 MiB outstanding covers 80 ms at 100 Mbit/s."""

FETCH_S = 60.0
"""Time limit for one object or chunk: 4 MiB at 0.6 Mbit/s."""

_VERSION = re.compile(r"(\d{1,15})\.(\d{1,15})")


class BroadcastService:
    """The learner's side: encodes and signs versions off the event loop and serves them."""

    def __init__(self, directory: Path, key: SigningKey) -> None:
        self._directory = directory
        self._key = key
        self._pool = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="codec")
        self._versions: PublishedVersions | None = None
        self._changed = asyncio.Condition()
        self.newest: Published | None = None

    def set_layout(self, layout: Layout) -> None:
        """The tensors and files of every version to come."""
        self._versions = PublishedVersions(self._directory, self._key, layout)

    async def publish(self, staging: Path, version: VersionId) -> Published:
        """Encode the staged weights, sign the head and announce it. The staging file must not change meanwhile."""
        assert self._versions is not None
        published = await asyncio.to_thread(self._versions.publish, staging, version, self._pool)
        async with self._changed:
            self.newest = published
            self._changed.notify_all()
        return published

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/head", self._get_head),
            web.get("/v1/objects/{digest:[0-9a-f]{64}}", self._get_object),
            web.get("/v1/versions/{version}/chunks/{index:[0-9]{1,9}}", self._get_chunk),
        ]

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

    async def _get_object(self, request: web.Request) -> web.Response:
        wanted = Digest(bytes.fromhex(request.match_info["digest"]))
        content = self._versions.object(wanted) if self._versions else None
        return binary(content) if content is not None else web.Response(status=410, text="no such object any more")

    async def _get_chunk(self, request: web.Request) -> web.Response:
        version = parse_version(request.match_info["version"])
        published = self._versions.find(version) if self._versions else None
        index = int(request.match_info["index"])
        data = await asyncio.to_thread(read_chunk, published, index) if published else None
        return binary(data) if data is not None else web.Response(status=410, text="no such chunk any more")


class Fetcher:
    """A sampler's side: newest head, layout once, then the chunks of a version into the weight map."""

    def __init__(self, peer: Peer, learner_key: bytes) -> None:
        self._peer = peer
        self._learner_key = learner_key
        self._pool = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="codec")

    async def newer_head(self, than: VersionId | None) -> Head | None:
        """The newest head once it is newer than `than`; None if the learner had none within HEAD_WAIT_S."""
        query = f"?newer_than={than}" if than else ""
        sealed = await self._peer.get("/v1/head" + query, cap_bytes=4096, timeout_s=HEAD_WAIT_S + 10)
        if not sealed:
            return None
        head = open_head(sealed, self._learner_key)
        if than is not None and head.version <= than:
            raise ProtocolError(f"asked for a version newer than {than}, the learner offers {head.version}")
        return head

    async def layout(self, head: Head) -> Layout:
        data = await self._object(head.layout_digest, head.layout_bytes)
        return await asyncio.to_thread(open_layout, data, head)

    async def table(self, head: Head, layout: Layout) -> ChunkTable:
        data = await self._object(head.table_digest, head.table_bytes)
        return await asyncio.to_thread(open_table, data, head, layout)

    async def chunks(self, head: Head, table: ChunkTable, into: WeightMap) -> None:
        """Fetch every chunk of a version, several at a time, each checked before it is kept (I2)."""
        await asyncio.to_thread(into.start, table)
        left = iter(range(len(chunk_spans(table))))

        async def fetch_from_list() -> None:
            for index in left:
                path = f"/v1/versions/{head.version}/chunks/{index}"
                data = await self._peer.get(path, cap_bytes=table.chunk_bytes, timeout_s=FETCH_S)
                await asyncio.to_thread(into.store, table, index, data)

        tasks = [asyncio.create_task(fetch_from_list()) for _ in range(CHUNKS_IN_FLIGHT)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def apply(self, head: Head, table: ChunkTable, into: WeightMap) -> None:
        """Decode what was fetched over the map, off the event loop."""
        await asyncio.to_thread(into.apply, head, table, self._pool)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _object(self, wanted: bytes, nbytes: int) -> bytes:
        return await self._peer.get(f"/v1/objects/{wanted.hex()}", cap_bytes=nbytes, timeout_s=FETCH_S)


def parse_version(text: str) -> VersionId:
    """A version as str(VersionId) writes it."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ProtocolError(f"{text[:40]!r} is not a version like 0.12")
    return VersionId(incarnation=int(match[1]), version=int(match[2]))
