"""What a node holds of the versions under way, when it came, and what of that the learner has been told."""

from __future__ import annotations

import asyncio
import time
from typing import Literal, get_args

from swarm.broadcast.notes import Complete
from swarm.broadcast.store.store import VersionStore
from swarm.broadcast.transfers import Link, Transfers
from swarm.types import NodeId, VersionId

MAX_TIMES = 16  # `status` shows the times of this many versions
Stage = Literal["announced_s", "first_chunk_s", "complete_s", "applied_s", "installed_s", "drawn_s"]
"""What a version goes through at a node, in this order: its head is here and proven; its first and its last chunk; all
of it is in the map; the engine holds it; the first sample that it drew has ended."""


class VersionProgress:
    """The times of the last few versions, and what each link to the learner was told."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._told_over: Link | None = None
        self._told: frozenset[VersionId] = frozenset()
        self.times: dict[VersionId, dict[str, float | None]] = {}

    def note_time(self, version: VersionId, stage: Stage, at: float | None = None) -> None:
        """Note that a stage is reached, now unless `at` is given. The first time counts."""
        times = self.times.setdefault(version, dict.fromkeys(get_args(Stage)))
        times[stage] = times[stage] or at or time.monotonic()
        while len(self.times) > MAX_TIMES:
            del self.times[min(self.times)]

    async def goes_on(self, news: asyncio.Event, patience_s: float) -> bool:
        """Wait for `news`. Return False once no chunk of a version under way has come for `patience_s`."""
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
        """Tell the learner what is held, once over each link."""
        link = self._transfers.links.get(learner)
        if link is None:
            return
        if link is not self._told_over:
            self._told_over, self._told = link, frozenset()
        held = {found.head.version for found in store.versions() if found.chunks.complete}
        if in_map is not None:
            held.add(in_map)
        for version in sorted(held - self._told):
            link.say(version, Complete(chunks=False))
        self._told = frozenset(held)
