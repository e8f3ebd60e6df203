"""The relay node: no model, no engine; it keeps the swarm together, and carries its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.broadcast.receiver import OtherModel, Receiver
from swarm.errors import first_fault
from swarm.gossip.records import Profile
from swarm.node.identity import StateDirectory
from swarm.node.joining import DataPlane, join_settings, open_base, reachability_line, unless_stopped, weights_directory
from swarm.node.network import NodeNetwork
from swarm.settings import JoinConfig


class RelayNode:
    """One relay. `say` gets lines for the person at the terminal."""

    def __init__(self, config: JoinConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._stop = asyncio.Event()
        self._state = "looking for the swarm"

    def request_stop(self) -> bool:
        """Leave with a word."""
        self._stop.set()
        self._say("leaving; telling the others (again to leave at once)")
        return True

    def last_words(self) -> str:
        """ "" of a node that nobody asked to leave."""
        return "left the swarm" if self._stop.is_set() else ""

    async def run(self) -> None:
        """Take part until a stop is requested."""
        state = StateDirectory.claim(self._config.state_dir, "relay")
        try:
            base = await asyncio.to_thread(open_base, self._config.base)
            network = NodeNetwork(state.path, "relay", join_settings(self._config), say=self._say, emit=self._emit)
            self._network = network
            self._data = DataPlane(network.station, say=self._say, base=base)
            await network.start(self._data.routes(), self.status, on_stream=self._data.accept)
            self._say(f"relay {network.node}; status: echo-node status {network.address.url}")
            try:
                await self._swarms(network, state.path)
            finally:
                await network.stop()
                self._data.close()
        finally:
            state.release()

    def status(self) -> dict[str, Any]:
        """What the node says of itself; the keys are described in docs/protocol.md."""
        own = {"state": self._state, "bootstrap": list(self._config.bootstrap)}
        return {**self._network.status(), **own, **self._data.status()}

    async def _swarms(self, network: NodeNetwork, state_dir: Path) -> None:
        """One swarm, or one of its models, after another, until a stop is requested."""
        while not self._stop.is_set():
            try:
                await self._take_part(network, state_dir)
            except* OtherModel as changed:
                self._say(f"{first_fault(changed)}; joining it anew")

    async def _take_part(self, network: NodeNetwork, state_dir: Path) -> None:
        self._state = "looking for the swarm"
        found = await unless_stopped(self._stop, network.find())
        if found is None:
            return
        self._say(network.trust_line())
        key = found.hello.learner_key
        directory = await asyncio.to_thread(weights_directory, state_dir, found.hello.swarm)
        async with network.swarm(key, found.learner.record.round_s), self._data.receiving(directory, key) as receiver:
            self._state = "relaying"
            telling = asyncio.create_task(self._tell_held(network, receiver))
            try:
                await self._stop.wait()
            finally:
                telling.cancel()
            self._state = "leaving"

    async def _tell_held(self, network: NodeNetwork, receiver: Receiver) -> None:
        held = None
        while True:
            held = (await receiver.installed(held)).head.version
            network.set_profile(Profile(held=held, uplink_bytes_per_s=float(f"{receiver.uplink_bytes_per_s:.2g}")))

    def _emit(self, kind: str, **fields: Any) -> None:
        if kind in ("reachable", "unreachable"):
            self._say(reachability_line(fields["address"]))
