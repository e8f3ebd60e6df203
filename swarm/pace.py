"""Caps on what a node sends and receives, shared fairly by all of its streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Pace:
    """A cap on one direction of all streams of a node: a token bucket, streams served in the order they came.

    `bytes_per_s` is of the line: frames count with what TCP and IP add to them.
    """

    BURST_S = 0.05
    OVERHEAD = 1500 / 1448
    LEAST_BURST_BYTES = 64 * 1024

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s / self.OVERHEAD if bytes_per_s else None
        self._burst = max(self.LEAST_BURST_BYTES, self.BURST_S * (self._rate or 0.0))
        self._free_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.total_bytes = 0

    def admits(self, resume: Callable[[], None]) -> bool:
        """Whether bytes may flow now; if not, `resume` is called when its turn has come."""
        if self._rate is None:
            return True
        loop = asyncio.get_running_loop()
        if not self._waiting and loop.time() >= self._free_at - self._burst / self._rate:
            return True
        self._waiting.append(resume)
        self._arm(loop)
        return False

    def took(self, nbytes: int) -> None:
        """So many bytes flowed."""
        self.total_bytes += nbytes
        if self._rate is not None:
            self._free_at = max(self._free_at, asyncio.get_running_loop().time()) + nbytes / self._rate

    async def flow(self, nbytes: int) -> None:
        """Wait until `nbytes` may flow, and count them: for what does not run over a stream."""
        admitted = asyncio.Event()
        while not self.admits(admitted.set):
            await admitted.wait()
            admitted.clear()
        self.took(nbytes)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._waiting:
            assert self._rate is not None
            self._timer = loop.call_at(self._free_at - self._burst / self._rate, self._fire)

    def _fire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        assert self._rate is not None
        while self._waiting and loop.time() >= self._free_at - self._burst / self._rate:
            self._waiting.popleft()()
        self._arm(loop)
