"""Waiting for the next change of something."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Changes:
    """Wakes all tasks that wait for the next change."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Note a change."""
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int, seconds: float | None) -> None:
        """Return once `count` differs from `seen`, or after `seconds`."""
        if self.count == seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
