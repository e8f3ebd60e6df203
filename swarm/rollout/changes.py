"""Waiting until something changes."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Changes:
    """Wakes everybody who waits for the next change."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Something has changed."""
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int, seconds: float | None) -> None:
        """Return once there were more than `seen` changes, or after `seconds`."""
        if self.count == seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
