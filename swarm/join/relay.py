"""The role of a node without a model: it keeps the swarm together and carries its weights."""

from __future__ import annotations

import asyncio
from typing import Any

from swarm.broadcast.receiver.receiver import Receiver
from swarm.join.joining import JoiningNode
from swarm.node.bootstrap import Greeting


class RelayNode(JoiningNode):
    """A relay."""

    role = "relay"

    def last_words(self) -> str:
        """Return the last line for the person at the terminal; "" if the node was not asked to leave."""
        if not self._stop.is_set() or self._is_elsewhere:
            return ""
        return self._log.keep("ended before it was in a swarm" if self._card is None else "left the swarm")

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
            held = (await receiver.upkeep.installed(held)).head.version
            self._network.set_held(held)
