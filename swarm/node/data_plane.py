"""A joining node's place for its receiver: the server is up before a swarm is found, and outlives one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from swarm.broadcast.basemodel import BaseModel
from swarm.broadcast.coding import coding_pool
from swarm.broadcast.links import Station
from swarm.broadcast.receiver import Receiver
from swarm.broadcast.serving import VersionServer
from swarm.stream import Incoming


class DataPlane:
    """Routes and streams of whichever receiver runs."""

    def __init__(self, station: Station, *, say: Callable[[str], None], base: BaseModel | None) -> None:
        self._station = station
        self._say = say
        self._base = base
        self._pool = coding_pool()
        self._receiver: Receiver | None = None
        self._server = VersionServer(
            lambda: self._receiver.store if self._receiver else None,
            lambda: self._receiver.weights if self._receiver else None,
            self._pool,
            meter=station.upload.flow,
        )

    def routes(self) -> list[web.RouteDef]:
        return self._server.routes()

    async def accept(self, incoming: Incoming) -> None:
        """Take a stream for the receiver that runs."""
        if self._receiver is not None:
            await self._receiver.accept(incoming)
        else:
            incoming.sock.close()
            incoming.leave()

    @asynccontextmanager
    async def receiving(self, directory: Path, learner_key: bytes) -> AsyncIterator[Receiver]:
        """Receive the versions of one swarm for as long as the block runs."""
        receiver = self._receiver = Receiver(
            directory, learner_key, self._station, pool=self._pool, say=self._say, base=self._base
        )
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(receiver.run())
                try:
                    yield receiver
                finally:
                    task.cancel()
        finally:
            self._receiver = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, Any]:
        return self._receiver.status() if self._receiver else {"streams": 0}
