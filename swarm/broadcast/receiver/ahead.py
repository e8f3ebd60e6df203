"""Decoding a version's regions while its other chunks are still on their way.

A delta's regions are small, and many are whole long before the last chunk comes. A map in memory takes them then
(store/weight_map.py), so that little is left to do once all of a version is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from swarm.broadcast.coding import in_thread
from swarm.broadcast.store.store import Held
from swarm.broadcast.store.weight_map import WeightMap
from swarm.broadcast.version.manifest import encoded_spans
from swarm.types import VersionId

AT_ONCE = 64  # Regions decoded in one go: the map may not change meanwhile


class WholeRegions:
    """Says which regions become whole as the chunks of `held` arrive."""

    def __init__(self, held: Held) -> None:
        self._missing: list[int] = []
        self._touching: dict[int, list[int]] = {}
        self.whole: list[int] = []
        """Regions that are whole and that nobody has taken yet."""
        self.follow(held)

    def follow(self, held: Held) -> None:
        """Follow the regions of further segments too."""
        self.held = held
        chunks, spans = held.chunks, encoded_spans(held.table)
        for region in range(len(self._missing), len(spans)):
            missing = [index for index in chunks.touched(spans[region]) if not chunks.has(index)]
            self._missing.append(len(missing))
            for index in missing:
                self._touching.setdefault(index, []).append(region)
            if not missing:
                self.whole.append(region)

    def arrived(self, index: int) -> None:
        """Count a chunk that is here now. It may come again."""
        for region in self._touching.pop(index, ()):
            self._missing[region] -= 1
            if not self._missing[region]:
                self.whole.append(region)

    def take(self) -> list[int]:
        """Return up to AT_ONCE whole regions, and forget them."""
        taken, self.whole[:] = self.whole[:AT_ONCE], self.whole[AT_ONCE:]
        return taken


@dataclass(slots=True)
class DecodingAhead:
    """`weights` returns the map, `pool` decodes."""

    weights: Callable[[], WeightMap | None]
    pool: Executor
    _coming: WholeRegions | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, held: Held) -> None:
        """Follow a version that is under way, or more of its segments, instead of an older one."""
        if (weights := self.weights()) is None or not weights.in_memory or held.chunks.complete:
            return
        if (regions := self._of(held.version)) is not None:
            regions.follow(held)
        else:
            self._coming = WholeRegions(held)

    def arrived(self, version: VersionId, index: int) -> None:
        if (regions := self._of(version)) is not None:
            regions.arrived(index)
            if regions.whole:
                self._news.set()

    def end(self, version: VersionId) -> None:
        """Leave the rest of a version to `apply`: it is complete, or was given up."""
        if self._of(version) is not None:
            self._coming = None

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            regions, weights = self._coming, self.weights()
            while regions is not None and regions is self._coming and regions.whole and weights is not None:
                # While the map does not hold the base yet, `apply` will have to do it.
                await in_thread(weights.decode_ahead, regions.held, regions.take(), self.pool)

    def _of(self, version: VersionId) -> WholeRegions | None:
        return self._coming if self._coming is not None and self._coming.held.version == version else None
