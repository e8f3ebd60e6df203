"""What a node serves from its disk over HTTP: heads, objects, chunks, and full regions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from aiohttp import web

from swarm.broadcast.store.store import HeldVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap
from swarm.errors import ProtocolError
from swarm.net.client import binary
from swarm.net.wire import Digest, encode
from swarm.types import VersionId

ENCODINGS_AT_A_TIME = 2
"""Regions encoded for others at a time. The codec's other threads are for this node's own versions."""

ENCODINGS_WAITING = 32
"""Requests that may wait for an encoding, each at most 12 ms behind the one before. Others are told to come back."""

Meter = Callable[[int], Awaitable[None]]
"""Waits until that many bytes may cross the line: the node's upload or download cap."""

_VERSION = re.compile(r"(\d{1,15})\.(\d{1,15})")


class VersionServer:
    """Answers for a store and the map beside it, once they are there. `meter` is awaited before a body is sent. Regions
    are encoded in `pool`, which may be replaced."""

    def __init__(
        self,
        store: Callable[[], VersionStore | None],
        weights: Callable[[], WeightMap | None],
        pool: Executor,
        *,
        meter: Meter | None = None,
    ) -> None:
        self._store = store
        self._weights = weights
        self.pool = pool
        self._meter = meter
        self._encoding = asyncio.Semaphore(ENCODINGS_AT_A_TIME)
        self._waiting = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/objects/{digest:[0-9a-f]{64}}", self._get_object),
            web.get("/v1/versions/{version}/head", self._get_head),
            web.get("/v1/versions/{version}/chunks/{index:[0-9]{1,9}}", self._get_chunk),
            web.get("/v1/versions/{version}/regions/{index:[0-9]{1,9}}", self._get_region),
        ]

    async def _get_object(self, request: web.Request) -> web.Response:
        store = self._store()
        wanted = Digest(bytes.fromhex(request.match_info["digest"]))
        return await self._send(store.object(wanted) if store else None, "object")

    async def _get_head(self, request: web.Request) -> web.Response:
        held = self._find(request)
        return await self._send(held.sealed_head if held else None, "version")

    async def _get_chunk(self, request: web.Request) -> web.Response:
        held, index = self._find(request), int(request.match_info["index"])
        if held is None or index >= len(held.chunks.spans) or not held.chunks.has(index):
            return await self._send(None, "chunk")
        # In a thread, because the page may have to come from the disk.
        return await self._send(await asyncio.to_thread(bytes, held.chunks.chunk(index)), "chunk")

    async def _get_region(self, request: web.Request) -> web.Response:
        """Answer with a region of the map, encoded in full for this caller alone."""
        held, weights, index = self._find(request), self._weights(), int(request.match_info["index"])
        if held is None or weights is None or index >= len(held.table.regions):
            return await self._send(None, "region")
        if self._waiting >= ENCODINGS_WAITING:
            return web.Response(status=503, text="busy with other nodes' regions", headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._encoding:
                wanted = held.table.regions[index].decoded_digest
                loop = asyncio.get_running_loop()
                region = await loop.run_in_executor(self.pool, weights.encode_full, index, wanted)
        finally:
            self._waiting -= 1
        return await self._send(encode(region) if region else None, "region")

    def _find(self, request: web.Request) -> HeldVersion | None:
        version, store = parse_version(request.match_info["version"]), self._store()
        return store.find(version) if store else None

    async def _send(self, content: bytes | None, what: str) -> web.Response:
        if content is None:
            return web.Response(status=410, text=f"no such {what} here any more")
        if self._meter is not None:
            await self._meter(len(content))
        return binary(content)


def parse_version(text: str) -> VersionId:
    """Parse a version as str(VersionId) writes it. Raise ProtocolError for any other text."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ProtocolError(f"{text[:40]!r} is not a version like 0.12")
    return VersionId(incarnation=int(match[1]), version=int(match[2]))
