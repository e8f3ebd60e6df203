"""A receiver's whole data plane: links, the versions under way, and the weight map that is brought up to date.

Announcements come from the learner alone, heads signed, tables proven by them. A version is opened when its base is here
or coming; it is applied when all of it is here and the map holds its base. Whoever is behind that asks peers for stored
deltas or full regions (catchup.py), the learner last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web

from swarm.broadcast.catchup import catch_up
from swarm.broadcast.links import Links, Station
from swarm.broadcast.manifest import LAYOUT_BYTES, Head, needs_base, open_head, open_layout, open_table
from swarm.broadcast.relay import Relay
from swarm.broadcast.roster import Member, Roster, whom_to_dial
from swarm.broadcast.serving import VersionServer
from swarm.broadcast.store import HeldVersion, VersionStore
from swarm.broadcast.transfers import HEAD, MAX_ACTIVE, ROSTER, ROSTER_BYTES, TABLE, Transfer, Transfers
from swarm.broadcast.weights import WeightMap, open_weights
from swarm.errors import EchoError, PeerUnreachable, ProtocolError
from swarm.http import Peer
from swarm.stream import Frame, Incoming
from swarm.types import Address, NodeId, VersionId
from swarm.wire import decode

CODING_THREADS = 2
"""Regions decoded at a time: two leave room for the network on a small machine."""

MAX_ANNOUNCED = 16
"""Announcements that wait to be opened; the oldest is dropped."""

PATIENCE_S = 10.0
"""How long a node that is behind waits for its peers to be up to date before it burdens the learner."""

RETRY_S = 1.0

FETCH_S = 60.0
"""Time limit for the layout: 32 MiB at 4.5 Mbit/s."""


class Receiver:
    """One receiver of the versions that the owner of `learner_key` signs. `say` tells the person at the terminal."""

    def __init__(
        self, directory: Path, me: NodeId, learner_key: bytes, station: Station, *, say: Callable[[str], None]
    ) -> None:
        self._me = me
        self._learner_key = learner_key
        self._station = station
        self._say = say
        self._directory = directory
        self._pool = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="codec")
        self._roster = Roster(members=())
        self._links = station.links(self._open_link, self._admits)
        self._transfers = Transfers(
            is_leaf=self._is_leaf,
            on_frame=self._on_frame,
            on_link=lambda node, up: None,
            on_complete=self._on_complete,
            on_fault=self._links.bar,
        )
        self._heads: dict[VersionId, tuple[bytes, Head]] = {}
        self._announced: asyncio.Queue[tuple[bytes, Head, bytes]] = asyncio.Queue(maxsize=MAX_ANNOUNCED)
        self._changed = asyncio.Condition()
        self._target: HeldVersion | None = None
        self._steady = asyncio.Lock()
        self._times: dict[VersionId, dict[str, float | None]] = {}
        self._lacking_since: float | None = None
        self.store: VersionStore
        self.weights: WeightMap | None = None

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until cancelled."""
        self.store = await asyncio.to_thread(VersionStore, self._directory, self._learner_key)
        if self.store.layout is not None:
            self.weights = await asyncio.to_thread(open_weights, self.store)
        self._server = VersionServer(self.store, lambda: self.weights, self._pool, meter=self._station.upload.flow)
        learner, _ = self._station.learner()
        self._links.dial({learner: lambda: self._station.learner()[1]})
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._open_announced())
                group.create_task(self._keep_up())
        finally:
            await self._links.close()
            for version in list(self._transfers.active):
                self._transfers.close(version)
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def accept(self, incoming: Incoming) -> None:
        await self._links.accept(incoming)

    def routes(self) -> list[web.RouteDef]:
        return []
