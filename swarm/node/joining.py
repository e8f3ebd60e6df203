"""What samplers and relays share: where they listen, how they stop, and their side of the broadcast."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from swarm.broadcast.coding import coding_pool
from swarm.broadcast.receiver import Receiver
from swarm.broadcast.serving import VersionServer
from swarm.broadcast.store.base_model import BaseModel, find_base
from swarm.net.hosts import is_loopback
from swarm.net.links import Station
from swarm.net.stream import Incoming
from swarm.node.bootstrap import PREFIX, read_bootstrap, read_join_line
from swarm.node.network import NetworkSettings, advertised
from swarm.settings import DEFAULT_PORT, JoinConfig, LeadConfig

R = TypeVar("R")


def join_settings(config: JoinConfig) -> NetworkSettings:
    """Listen on this machine alone if all bootstraps are here, else on every interface."""
    hosts = hosts_of(config.bootstrap)
    local = all(is_loopback(host) for host in hosts)
    # A relay's port is opened in a router once; a sampler needs none.
    port = config.port if config.port is not None else DEFAULT_PORT if config.role == "relay" and not local else 0
    return NetworkSettings(
        host=config.host or ("127.0.0.1" if local else "0.0.0.0"),
        port=port,
        bootstrap=tuple(config.bootstrap),
        tls=config.tls,
        lan=config.lan,
        max_upload_mbit=config.max_upload,
        max_download_mbit=config.max_download,
    )


def lead_settings(config: LeadConfig) -> NetworkSettings:
    """Where a learner listens. UserError for an address that is none, before anything is written."""
    settings = NetworkSettings(
        host=config.host,
        port=config.port,
        bootstrap=config.bootstrap,
        advertise=config.advertise,
        tls=config.tls,
        lan=config.lan,
        max_upload_mbit=config.max_upload,
        max_download_mbit=config.max_download,
        round_s=config.round_s,
    )
    advertised(settings, config.port or DEFAULT_PORT, b"")
    hosts_of(config.bootstrap)
    return settings


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, R] | asyncio.Future[R]) -> R | None:
    """The result of `work`, or None if `stop` is set first."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()


def reachability_line(address: str | None) -> str:
    """For the person at the terminal: whether others can dial this node."""
    if address is not None:
        return f"others can dial this node at {address}: it takes part as a public node"
    return "others cannot dial this node any more: it takes part as a leaf"


def weights_directory(state_dir: Path, swarm: str) -> Path:
    """Where the weights of a swarm are kept. Those of swarms that this node has left, gigabytes that nobody will read
    again, are removed. Blocking."""
    directory = state_dir / "swarms" / swarm
    for old in directory.parent.glob("*"):
        if old != directory:
            shutil.rmtree(old)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def open_base(name: str | None) -> BaseModel | None:
    """The copy of the base model that the user named: a directory, or an id in the Hugging Face cache. UserError if
    there is none. Blocking."""
    return BaseModel(find_base(name)) if name is not None else None


def hosts_of(bootstraps: Sequence[str]) -> list[str]:
    """Every host that bootstraps name. UserError if one is no bootstrap."""
    return [host for text in bootstraps for host in _hosts(text)]


def _hosts(text: str) -> list[str]:
    if text.startswith(PREFIX):
        return [address.host for address in read_join_line(text).addresses]
    return [read_bootstrap(text).host]


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
