"""The reasons why a node does not draw now: its owner paused it, or a limit that the owner set."""

from __future__ import annotations

import asyncio


class Holds:
    """Reasons by source, such as "owner" or "battery". The node draws while there is none."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._held = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()

    def set(self, source: str, reason: str) -> None:
        """Hold for `reason`, a few words such as "on battery"; "" lifts what `source` had set."""
        if reason:
            self._reasons[source] = reason
        else:
            self._reasons.pop(source, None)
        for event, is_so in ((self._held, bool(self._reasons)), (self._free, not self._reasons)):
            event.set() if is_so else event.clear()

    @property
    def reason(self) -> str:
        """The reason that came first; "" if nothing holds."""
        return next(iter(self._reasons.values()), "")

    async def wait_held(self) -> None:
        await self._held.wait()

    async def wait_free(self) -> None:
        await self._free.wait()
