"""The relay node: no model, no engine; it keeps the swarm together, and carries its weights."""

from __future__ import annotations

import asyncio
from typing import Any

from swarm.broadcast.receiver import Receiver
from swarm.gossip.records import Profile
from swarm.node.bootstrap import Greeting
from swarm.node.joining import JoiningNode


class RelayNode(JoiningNode):
    """One relay."""

    role = "relay"

    def request_stop(self) -> bool:
        """Leave with a word."""
        self._stop.set()
        self._say("leaving; telling the others (again to leave at once)")
        return True

    def last_words(self) -> str:
        """The last line for the person at the terminal; "" if nobody asked the node to leave."""
        return "left the swarm" if self._stop.is_set() else ""

    def status(self) -> dict[str, Any]:
        own = {"state": self._state, "bootstrap": list(self._config.bootstrap)}
        return {**self._network.status(), **own, **self._data.status()}

    def _set_state(self, state: str) -> None:
        self._state = state

    async def _take_part(self, found: Greeting, receiver: Receiver) -> bool:
        self._state = "relaying"
        telling = asyncio.create_task(self._tell_held(receiver))
        try:
            await self._stop.wait()
        finally:
            telling.cancel()
        self._state = "leaving"
        return False

    async def _tell_held(self, receiver: Receiver) -> None:
        held = None
        while True:
            held = (await receiver.installed(held)).head.version
            uplink = float(f"{receiver.uplink_bytes_per_s:.2g}")
            self._network.set_profile(Profile(held=held, uplink_bytes_per_s=uplink))
