"""Versions that were announced and whose chunk tables are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.broadcast.manifest import Head
from swarm.broadcast.tables import EarlyParts, TableParts
from swarm.types import NodeId, VersionId

MAX_ANNOUNCED = 4
"""Heads without tables, the newest: whoever is further behind is brought up to date another way (catchup.py)."""

TABLE_S = 2.0
"""A table that is not complete so long after its head is asked for: a relay may have died with a part of it."""


class Announced:
    """A head, and the parts of its table."""

    def __init__(self, sealed: bytes, head: Head, timer: asyncio.TimerHandle) -> None:
        self.sealed = sealed
        self.head = head
        self.parts = TableParts(head.table_bytes)
        self.timer = timer


class Announcements:
    """`on_ready` gets each version once: when its table is here, or does not come by itself."""

    def __init__(self, on_ready: Callable[[Announced], None]) -> None:
        self._on_ready = on_ready
        self._waiting: dict[VersionId, Announced] = {}
        self._early = EarlyParts()

    def take_head(self, sealed: bytes, head: Head) -> None:
        """A head that the learner signed, and the parts of its table that overtook it."""
        version = head.version
        if version in self._waiting:
            return  # again over a new link
        timer = asyncio.get_running_loop().call_later(TABLE_S, self._finish, version)
        self._waiting[version] = Announced(sealed, head, timer)
        while len(self._waiting) > MAX_ANNOUNCED:
            self._waiting.pop(min(self._waiting)).timer.cancel()
        for index, data, sender in self._early.take(version):
            self.take_part(version, index, data, sender)

    def take_part(self, version: VersionId, index: int, data: bytes, sender: NodeId) -> None:
        """A part of a table from anybody who is linked; it may overtake the head."""
        announced = self._waiting.get(version)
        if announced is None:
            self._early.put(version, index, data, sender)
        elif announced.parts.put(index, data, sender) and announced.parts.whole() is not None:
            self._finish(version)

    def close(self) -> None:
        for announced in self._waiting.values():
            announced.timer.cancel()
        self._waiting.clear()

    def _finish(self, version: VersionId) -> None:
        if (announced := self._waiting.pop(version, None)) is not None:
            announced.timer.cancel()
            self._on_ready(announced)
