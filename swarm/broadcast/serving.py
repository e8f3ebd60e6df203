"""What a node serves from its disk over HTTP: heads, objects, chunks, and full regions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Executor

from aiohttp import web

from swarm.broadcast.store.store import HeldVersion, VersionStore
from swarm.broadcast.store.weight_map import WeightMap
from swarm.broadcast.version.manifest import FullRegion
from swarm.errors import ProtocolError
from swarm.net.hosts import caller_of, network_of
from swarm.net.limits import Turns
from swarm.net.links import Station
from swarm.net.pace import Pace
from swarm.types import VersionId
from swarm.wire import Digest, encode

ENCODINGS_AT_A_TIME = 2
"""Regions encoded for others at a time. The codec's other threads are for this node's own versions."""

ENCODINGS_WAITING = 32
"""Requests that may wait for an encoding, each at most 12 ms behind the one before. Others are told to come back."""

OLDER_WEIGHT = 4  # A byte of an older version costs its caller so much of the upload cap: the newest one comes first

_VERSION = re.compile(r"(\d{1,15})\.(\d{1,15})")


class Places:
    """ENCODINGS_AT_A_TIME places. Callers get them in turns by address, and who waits with most requests makes room for
    the others."""

    def __init__(self) -> None:
        self._free = ENCODINGS_AT_A_TIME
        self._turns: Turns[asyncio.Future[bool]] = Turns()

    async def enter(self, caller: str) -> bool:
        """Wait for a place. Return False if there is no room to wait."""
        if self._free:
            self._free -= 1
            return True
        if len(self._turns) >= ENCODINGS_WAITING:
            if (out := self._turns.crowd_out(caller)) is None:
                return False
            if not out.done():
                out.set_result(False)
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._turns.add(caller, turn)
        try:
            return await turn
        except asyncio.CancelledError:
            self._turns.remove(caller, turn)
            if not turn.cancelled() and turn.result():
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place to the next one that still waits."""
        while self._turns:
            _, turn = self._turns.take()
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1


class PacedAnswer(web.Response):
    """An answer that is sent and counted piece by piece. A caller that hangs up costs no more than it got."""

    def __init__(self, body: bytes, pace: Pace, caller: str, weight: int) -> None:
        super().__init__(body=body, content_type="application/octet-stream")
        self._pace = pace
        self._caller = caller
        self._weight = weight

    async def write_eof(self, data: bytes = b"") -> None:
        assert isinstance(self.body, bytes)
        body = memoryview(self.body)
        for at in range(0, len(body), Pace.PIECE_BYTES):
            piece = body[at : at + Pace.PIECE_BYTES]
            await self._pace.flow(len(piece), self._caller, weight=self._weight)
            await self.write(piece)
        await web.StreamResponse.write_eof(self)


class VersionServer:
    """Answers for a store and the map beside it, once they are there. Regions are encoded in `pool`, which may be
    replaced. Callers at an address that is linked with this node keep the versions that they ask for."""

    def __init__(
        self,
        store: Callable[[], VersionStore | None],
        weights: Callable[[], WeightMap | None],
        pool: Executor,
        station: Station,
    ) -> None:
        self._store = store
        self._weights = weights
        self.pool = pool
        self._station = station
        self._places = Places()

    def routes(self) -> list[web.RouteDef]:
        answers = {
            "/v1/objects/{digest:[0-9a-f]{64}}": self._get_object,
            "/v1/versions/{version}/head": self._get_head,
            "/v1/versions/{version}/chunks/{index:[0-9]{1,9}}": self._get_chunk,
            "/v1/versions/{version}/regions/{index:[0-9]{1,9}}": self._get_region,
        }
        return [web.get(path, answer, allow_head=False) for path, answer in answers.items()]

    async def _get_object(self, request: web.Request) -> web.Response:
        store = self._store()
        wanted = Digest(bytes.fromhex(request.match_info["digest"]))
        return self._answer(request, store.object(wanted) if store else None, "object")

    async def _get_head(self, request: web.Request) -> web.Response:
        held = self._find(request)
        return self._answer(request, held.sealed_head if held else None, "version")

    async def _get_chunk(self, request: web.Request) -> web.Response:
        held, index = self._find(request), int(request.match_info["index"])
        if held is None or index >= len(held.chunks.spans) or not held.chunks.has(index):
            return self._answer(request, None, "chunk")
        # In a thread, because the page may have to come from the disk.
        chunk, store = await asyncio.to_thread(bytes, held.chunks.chunk(index)), self._store()
        is_newest = store is None or store.newest() is held
        return self._answer(request, chunk, "chunk", weight=1 if is_newest else OLDER_WEIGHT)

    async def _get_region(self, request: web.Request) -> web.Response:
        """Answer with a region of the map, encoded in full for this caller alone."""
        held, weights, index = self._find(request), self._weights(), int(request.match_info["index"])
        if held is None or weights is None or index >= len(held.table.regions):
            return self._answer(request, None, "region")
        if not await self._places.enter(_caller(request)):
            self._station.refused["encodings"] += 1
            return web.Response(status=503, text="busy with other nodes' regions", headers={"Retry-After": "1"})
        wanted = held.table.regions[index].decoded_digest
        encoding = asyncio.ensure_future(self._encode(weights, index, wanted))
        # A caller that hangs up does not free the thread: the place is given on when that is done.
        region = await asyncio.shield(encoding)
        return self._answer(request, encode(region) if region else None, "region")

    async def _encode(self, weights: WeightMap, index: int, wanted: bytes) -> FullRegion | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, weights.encode_full, index, wanted)
        finally:
            self._places.leave()

    def _find(self, request: web.Request) -> HeldVersion | None:
        version, store = parse_version(request.match_info["version"]), self._store()
        is_linked = caller_of(request.remote or "") in self._station.linked_at.values()
        return store.find(version, keeps=is_linked) if store else None

    def _answer(self, request: web.Request, content: bytes | None, what: str, weight: int = 1) -> web.Response:
        if content is None:
            return web.Response(status=410, text=f"no such {what} here any more")
        return PacedAnswer(content, self._station.upload, _caller(request), weight)


def _caller(request: web.Request) -> str:
    """Return under which name a caller shares: anybody may have a /48 with 65,536 homes."""
    return network_of(request.remote or "")


def parse_version(text: str) -> VersionId:
    """Parse a version as str(VersionId) writes it. Raise ProtocolError for any other text."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ProtocolError(f"{text[:40]!r} is not a version like 0.12")
    return VersionId(incarnation=int(match[1]), version=int(match[2]))
