"""Waiting for something to change, without waking everybody for everything."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Changes:
    """Wakes all who wait for the next change. Who waits again is woken by the changes after that alone."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Something has changed."""
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int, seconds: float | None) -> None:
        """Until there were more than `seen` changes, or for so long."""
        if self.count == seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
