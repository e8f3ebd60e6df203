"""The relay node: no model, no engine; it keeps the swarm together, and carries what others need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from swarm.config import JoinConfig
from swarm.node.identity import StateDirectory
from swarm.node.joining import join_settings, reachability_line, unless_stopped
from swarm.node.network import NodeNetwork


class RelayNode:
    """One relay. `say` gets lines for the person at the terminal."""

    stop_line = "leaving (again to leave at once)"
    """Said at the first signal."""

    def __init__(self, config: JoinConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._stop = asyncio.Event()
        self._state = "looking for the swarm"

    def request_stop(self) -> None:
        """Leave with a word."""
        self._stop.set()

    async def run(self) -> None:
        """Take part until a stop is requested."""
        state = StateDirectory.claim(self._config.state_dir, "relay")
        try:
            network = NodeNetwork(state.path, "relay", join_settings(self._config), say=self._say, emit=self._emit)
            self._network = network
            await network.start([], self.status)
            self._say(f"relay {network.node}; status: echo-node status {network.address.url}")
            try:
                await self._take_part(network)
            finally:
                await network.stop()
        finally:
            state.release()

    def status(self) -> dict[str, Any]:
        """What the node says of itself; the keys are described in docs/protocol.md."""
        return {**self._network.status(), "state": self._state, "bootstrap": list(self._config.bootstrap)}

    async def _take_part(self, network: NodeNetwork) -> None:
        found = await unless_stopped(self._stop, network.find())
        if found is None:
            return
        self._say(network.trust_line())
        async with network.swarm(found.hello.learner_key, found.learner.record.round_s):
            self._state = "relaying"
            await self._stop.wait()
            self._state = "leaving"

    def _emit(self, kind: str, **fields: Any) -> None:
        if kind in ("reachable", "unreachable"):
            self._say(reachability_line(kind, fields["address"]))
