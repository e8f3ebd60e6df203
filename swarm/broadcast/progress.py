"""How a receiver fares with the last few versions: their times for `status`, and what the learner is told."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from swarm.broadcast.notes import Complete
from swarm.broadcast.store import VersionStore
from swarm.broadcast.transfers import Link, Transfers
from swarm.types import NodeId, VersionId

MAX_TIMES = 16
"""Versions whose times `status` shows."""


class Progress:
    """Of the versions that a node takes part in, and of those that it comes to hold in another way."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._told_over: Link | None = None
        self._told: frozenset[VersionId] = frozenset()
        self.times: dict[VersionId, dict[str, float | None]] = {}

    def note_time(self, version: VersionId, what: Literal["announced_s", "complete_s"]) -> None:
        times = self.times.setdefault(version, {"announced_s": None, "complete_s": None})
        times[what] = times[what] or time.monotonic()
        while len(self.times) > MAX_TIMES:
            del self.times[min(self.times)]

    async def goes_on(self, news: asyncio.Event, patience_s: float) -> bool:
        """Wait for `news`; False once no chunk of what is under way has come for `patience_s`."""
        while True:
            missing = self._missing()
            try:
                async with asyncio.timeout(patience_s):
                    return await news.wait()
            except TimeoutError:
                if self._missing() == missing:
                    return False

    def _missing(self) -> dict[VersionId, int]:
        return {version: transfer.held.chunks.missing for version, transfer in self._transfers.active.items()}

    def tell(self, learner: NodeId, store: VersionStore, in_map: VersionId | None) -> None:
        """Tell the learner what is held, once over each link. A transfer that is whole has said so itself."""
        link = self._transfers.links.get(learner)
        if link is None:
            return
        if link is not self._told_over:
            self._told_over, self._told = link, frozenset()
        held = {found.head.version for found in store.versions() if found.chunks.complete}
        if in_map is not None:
            held.add(in_map)
        for version in sorted(held - self._told):
            transfer = self._transfers.active.get(version)
            if transfer is None or transfer.completed_at is None:
                link.say(version, Complete(chunks=False))
        self._told = frozenset(held)
