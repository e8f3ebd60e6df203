"""A receiver's whole data plane: links, the versions under way, and the weight map that follows them.

The learner announces versions. A node opens one when its base is here or coming (opening.py), and applies it when all
of it is here and the map holds its base (upkeep.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from swarm.broadcast.receiver.ahead import DecodingAhead
from swarm.broadcast.receiver.neighbours import Neighbours
from swarm.broadcast.receiver.opening import Opening
from swarm.broadcast.receiver.progress import Stage
from swarm.broadcast.receiver.upkeep import Upkeep
from swarm.broadcast.store.base_model import BaseModel
from swarm.broadcast.transfers import Transfer, Transfers
from swarm.net.links import Station
from swarm.net.stream import Incoming
from swarm.types import NodeId, VersionId


class Receiver:
    """One receiver of the versions that the owner of `learner_key` signs. `say` tells the person at the terminal.
    `place` gives a directory in memory for a map of so many bytes, or None."""

    def __init__(
        self,
        directory: Path,
        learner_key: bytes,
        station: Station,
        *,
        pool: Executor,
        say: Callable[[str], None],
        base: BaseModel | None = None,
        place: Callable[[int], Path | None] = lambda nbytes: None,
    ) -> None:
        self._say = say
        self._transfers = Transfers(
            is_leaf=lambda node: self._neighbours.is_leaf(node),
            on_frame=lambda node, frame, payload: self.opening.on_frame(node, frame, payload),
            on_link=lambda node, up: self.upkeep.tell_learner(),
            on_complete=self._on_complete,
            on_fault=self._leave,
            on_chunk=lambda version, index: self._ahead.arrived(version, index),
        )
        self._neighbours = Neighbours(station, self._transfers.open_link)
        links = station, self._transfers, self._neighbours
        self.upkeep = Upkeep(directory, learner_key, *links, pool=pool, say=say, place=place)
        self._ahead = DecodingAhead(lambda: self.upkeep.weights, pool)
        self.opening = Opening(learner_key, *links, self.upkeep, self._ahead, say=say, base=base)

    async def run(self) -> None:
        try:
            await self.upkeep.open()
            self._neighbours.dial()
            async with asyncio.TaskGroup() as group:
                group.create_task(self.opening.run())
                group.create_task(self.upkeep.run())
                group.create_task(self._ahead.run())
        finally:
            await self._neighbours.close()
            self.opening.close()
            for version in list(self._transfers.active):
                self._transfers.close(version)
            self.upkeep.close()

    async def accept(self, incoming: Incoming) -> None:
        await self._neighbours.links.accept(incoming)

    def note_time(self, version: VersionId, stage: Stage) -> None:
        """Note what became of a version after this node had it."""
        self.upkeep.progress.note_time(version, stage)

    @property
    def uplink_bytes_per_s(self) -> float:
        return self._transfers.uplink_bytes_per_s

    def status(self) -> dict[str, Any]:
        active = self._transfers.active
        return {
            "map": str(self.upkeep.version) if self.upkeep.version else None,
            "streams": len(self._transfers.links),
            "stream_bytes_sent": self._transfers.sent_bytes,
            "uplink_bytes_per_s": round(self.uplink_bytes_per_s),
            "versions": {str(version): times for version, times in self.upkeep.progress.times.items()},
            "chunks_held": {str(v): len(t.held.chunks.spans) - t.held.chunks.missing for v, t in active.items()},
            "chunks_rejected": dict(self._transfers.rejected),
            "syncing": self._syncing(),
        }

    def _syncing(self) -> dict[str, Any] | None:
        """Return the oldest version that is not whole here, with the share of its chunks that are."""
        for version, transfer in self._transfers.active.items():
            chunks, missing = len(transfer.held.chunks.spans), transfer.held.chunks.missing
            if missing:
                return {"version": str(version), "share": round(1 - missing / chunks, 3)}
        return None

    def _leave(self, node: NodeId) -> None:
        self._say(f"node {node} sent wrong chunks again and again; ignoring it for a while")
        self._neighbours.links.bar(node)

    def _on_complete(self, transfer: Transfer) -> None:
        version = transfer.held.version
        self._ahead.end(version)
        self.upkeep.progress.note_time(version, "first_chunk_s", transfer.first_chunk_at)
        self.upkeep.progress.note_time(version, "complete_s", transfer.completed_at)
        self.upkeep.tell_learner()
        self.upkeep.news.set()
