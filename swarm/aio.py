"""Waiting for the next change of something."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Changes:
    """Wakes all tasks that wait for the next change, in the order of their `rank`, and then of their coming."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: dict[asyncio.Future[None], float] = {}

    def tell(self) -> None:
        """Note a change."""
        self.count += 1
        for future in sorted(self._waiting, key=self._waiting.__getitem__):
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seen: int, seconds: float | None, *, rank: float = 0.0) -> None:
        """Return once `count` differs from `seen`, or after `seconds`."""
        if self.count != seen:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = rank
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await future
        finally:
            self._waiting.pop(future, None)
