"""The sampler node: identity, status, and one session after another until the run is over."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from swarm.config import DEFAULT_PORT, JoinConfig
from swarm.errors import ChildFailed, EchoError, ProtocolError, UserError, first_fault
from swarm.http import PeerClient, plain_address
from swarm.node.http import NodeServer
from swarm.node.identity import StateDirectory, load_or_create_key
from swarm.node.link import LearnerLink, SwarmChanged
from swarm.node.session import SamplerStatus, Session
from swarm.sampler.worker import EngineWorker
from swarm.signing import node_id_of
from swarm.wire import PROTOCOL

MAX_FAULTS = 5
"""Sessions in a row that broke without one accepted rollout: by then it is this machine, not chance."""

FAULT_PAUSE_S = 2.0
"""Pause before a new session, times the number of faults so far."""

R = TypeVar("R")


class SamplerNode:
    """One sampler. `say` gets lines for the person at the terminal."""

    def __init__(self, config: JoinConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._learner_url = learner_url(config.bootstrap)
        self._say = say
        self._stop = asyncio.Event()
        self._status = SamplerStatus()
        self._engine: EngineWorker | None = None

    def request_stop(self) -> None:
        """Finish what ends soon, hand the rest back, leave."""
        self._stop.set()

    async def run(self) -> None:
        """Sample until the run is over or a stop is requested. ChildFailed if the engine cannot be kept alive."""
        self._state = StateDirectory.claim(self._config.state_dir)
        server = NodeServer([], self.status)
        try:
            self._key = load_or_create_key(self._state.path)
            self._node = self._key.node_id
            port = await server.start(self._config.host, self._config.port)
            self._say(f"sampler {self._node}; status: echo-node status {self._config.host}:{port}")
            await self._sessions()
        finally:
            await server.stop()
            self._state.release()

    def status(self) -> dict[str, Any]:
        """What the node says of itself; the keys are described in docs/protocol.md."""
        return {
            "role": "sampler",
            "protocol": PROTOCOL,
            "node": self._node,
            "swarm": self._status.swarm,
            "state": self._status.state,
            "bootstrap": self._config.bootstrap,
            "fetched": str(self._status.fetched) if self._status.fetched else None,
            "verdicts": dict(self._status.verdicts),
            **(self._engine.status() if self._engine else {}),
        }

    async def _sessions(self) -> None:
        faults = 0
        while not self._stop.is_set():
            accepted = self._status.verdicts["accepted"]
            try:
                if await self._session():
                    self._say("the run is finished; thank you")
                    return
                continue
            except (EchoError, ExceptionGroup) as error:
                fault = first_fault(error)
            if isinstance(fault, SwarmChanged):
                self._say(f"{fault}; joining it")
                continue
            faults = 1 if self._status.verdicts["accepted"] > accepted else faults + 1
            if not isinstance(fault, ChildFailed | ProtocolError) or faults >= MAX_FAULTS:
                raise fault
            self._say(f"{fault}; starting again ({faults} of {MAX_FAULTS} faults in a row)")
            await self._unless_stopped(asyncio.sleep(FAULT_PAUSE_S * faults))

    async def _session(self) -> bool:
        """Find the learner and work for it; True when the run is over. The engine starts meanwhile."""
        engine = self._engine = EngineWorker(
            self._state.path, device=self._config.device, hang_s=self._config.engine_hang_s
        )
        self._status.state = "looking for the learner"
        launch = asyncio.create_task(engine.launch())
        try:
            async with PeerClient(plain_address(self._learner_url)) as peer:
                link = LearnerLink(peer, self._say)
                hello = await self._unless_stopped(link.find())
                if hello is None:
                    return False
                peer.sign(self._key, node_id_of(hello.learner_key))
                self._status.swarm = hello.swarm
                self._say(f"found the learner of swarm {hello.swarm}; trusting it because {self._learner_url} said so")
                await self._unless_stopped(asyncio.shield(launch))
                if self._stop.is_set():
                    return False
                launch.result()
                directory = self._state.path / "swarms" / hello.swarm
                await asyncio.to_thread(_remove_other_swarms, directory)
                session = Session(
                    node=self._node,
                    hello=hello,
                    link=link,
                    engine=engine,
                    directory=directory,
                    capacity=self._config.batch_samples,
                    status=self._status,
                    say=self._say,
                )
                return await session.run(self._stop)
        finally:
            launch.cancel()
            await asyncio.gather(launch, return_exceptions=True)
            await engine.stop()

    async def _unless_stopped(self, work: Coroutine[Any, Any, R] | asyncio.Future[R]) -> R | None:
        """The result of `work`, or None if a stop is requested first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stop.cancel()


def _remove_other_swarms(directory: Path) -> None:
    """Weights of swarms that this node has left: gigabytes that nobody will read again."""
    for old in directory.parent.glob("*"):
        if old != directory:
            shutil.rmtree(old)


def learner_url(bootstrap: str) -> str:
    """`host`, `host:port` or a URL as a base URL. UserError if it is none of them."""
    text = bootstrap if "://" in bootstrap else f"http://{bootstrap}"
    try:
        parts = urlsplit(text)
        port = parts.port or DEFAULT_PORT
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UserError(f"{bootstrap!r} is not an address like host or host:7700 ({error})") from error
    known = parts.scheme == "http" and parts.path in ("", "/")
    if not known or not parts.hostname or not re.fullmatch(r"[A-Za-z0-9._:-]+", parts.hostname):
        raise UserError(f"{bootstrap!r} is not an address like host or host:7700")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"
