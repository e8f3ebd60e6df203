"""A cap on what a node sends or receives in all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from swarm.net.limits import Turns


class Pace:
    """A cap on one direction of all that a node sends or receives: a token bucket. Streams and HTTP callers, by name,
    get equal numbers of bytes of it.

    `bytes_per_s` is measured on the line: it includes what TCP and IP add. None means no cap.
    """

    BURST_S = 0.05
    OVERHEAD = 1500 / 1448
    MIN_BURST_BYTES = 64 * 1024
    PIECE_BYTES = 64 * 1024  # What flows of an HTTP body in one turn: about as much as of a stream
    QUANTUM_BYTES = 4 * 1024  # Smaller than a chunk: a name that sends less in a turn gets less

    def __init__(self, bytes_per_s: float | None) -> None:
        self._set_rate(bytes_per_s)
        self._free_at = 0.0
        self._turns: Turns[Callable[[], None]] = Turns(self.QUANTUM_BYTES)
        self._woken: Hashable = None
        self._timer: asyncio.Handle | None = None
        self.total_bytes = 0

    def _set_rate(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s / self.OVERHEAD if bytes_per_s else None
        self._burst = max(self.MIN_BURST_BYTES, self.BURST_S * (self._rate or 0.0))

    def change(self, bytes_per_s: float | None) -> None:
        """Hold another cap from now on. What is ahead of the old one is paid off at the new one."""
        now = asyncio.get_running_loop().time()
        ahead_bytes = max(0.0, self._free_at - now) * (self._rate or 0.0)
        self._set_rate(bytes_per_s)
        self._free_at = now + (ahead_bytes / self._rate if self._rate else 0.0)
        if self._timer is not None:
            self._timer.cancel()
        self._fire()

    def admits(self, name: Hashable, resume: Callable[[], None]) -> bool:
        """Return True if bytes of `name` may flow now. If not, call `resume` when its turn has come; it then has to ask
        again within one turn of the loop."""
        if self._rate is None:
            return True
        if self._woken is not None and self._woken == name:
            self._woken = None
            return True
        loop = asyncio.get_running_loop()
        if not self._turns and self._woken is None and loop.time() >= self._ready_at():
            self._turns.forgive()
            return True
        self._turns.add(name, resume)
        self._arm(loop)
        return False

    def took(self, name: Hashable, nbytes: int) -> None:
        self.total_bytes += nbytes
        if self._rate is not None:
            self._free_at = max(self._free_at, asyncio.get_running_loop().time()) + nbytes / self._rate
            self._turns.charge(name, nbytes)

    async def flow(self, nbytes: int, name: Hashable = "fetched", *, weight: int = 1) -> None:
        """Wait until `nbytes` may flow, and count them. This is for transfers that do not run over a stream. In the
        share of `name` they count `weight` times."""
        for left in range(nbytes, 0, -self.PIECE_BYTES):
            await self._turn(name)
            piece = min(left, self.PIECE_BYTES)
            self.took(name, piece)
            self._turns.charge(name, (weight - 1) * piece)

    async def _turn(self, name: Hashable) -> None:
        came = asyncio.Event()
        try:
            while not self.admits(name, came.set):
                await came.wait()
                came.clear()
        finally:
            self._turns.remove(name, came.set)

    def _ready_at(self) -> float:
        assert self._rate is not None
        return self._free_at - self._burst / self._rate

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._turns:
            self._timer = loop.call_at(self._ready_at(), self._fire)

    def _fire(self) -> None:
        self._timer = self._woken = None
        loop = asyncio.get_running_loop()
        if self._rate is not None and loop.time() < self._ready_at():
            self._arm(loop)
        elif self._turns:
            self._woken, resume = self._turns.take()
            resume()
            # After the one that was woken: otherwise all would go on, and the first would take all there is.
            self._timer = loop.call_soon(self._fire)
