"""Waiting for something to change, without waking everybody for everything."""

from __future__ import annotations

import asyncio


class Changes:
    """Wakes whoever waits for the next change, once per turn of the loop however many changes there were."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._waking = False

    def tell(self) -> None:
        """Something has changed."""
        self.count += 1
        if self._waiting and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    async def wait(self, seen: int, seconds: float | None) -> None:
        """Until there were more than `seen` changes, or for so long."""
        if self.count != seen:
            return
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(seconds):
                await changed
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(changed)

    def _wake(self) -> None:
        self._waking = False
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)
