"""What samplers and relays share: where they listen, joining one swarm after another, and receiving the broadcast."""

from __future__ import annotations

import asyncio
import errno
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from swarm.aio import unless_stopped
from swarm.broadcast.coding import coding_pool, spare_threads
from swarm.broadcast.receiver.opening import OtherModel
from swarm.broadcast.receiver.receiver import Receiver
from swarm.broadcast.serving import VersionServer
from swarm.broadcast.store.base_model import BaseModel, find_base
from swarm.broadcast.store.disk import DiskFull, free_bytes, set_most_bytes
from swarm.broadcast.store.place import Wanted, forget_place, place_of_map
from swarm.errors import InUseElsewhere, UserError, first_fault
from swarm.join.given import FILE, KEEP_S, Given
from swarm.join.logs import SaidLog
from swarm.join.owner import BY_REJOINING, Holds
from swarm.join.spot import LEAVE_S, watch_notices
from swarm.join.watch import Watch, give_way, watch_clocks
from swarm.net.links import Station
from swarm.net.stream import Incoming
from swarm.node.bootstrap import Greeting
from swarm.node.control import control
from swarm.node.hello import Card, card_lines, open_card, purpose
from swarm.node.identity import StateDirectory
from swarm.node.network import NodeNetwork, where_to_listen
from swarm.settings import JoinConfig
from swarm.types import Role

R = TypeVar("R")
SWARMS = "swarms"  # In a state directory: the weights, by swarm
FINISH_S = 86_400.0  # `finish` waits for all samples under way: a day is the longest time limit of a lease
NO_PUBLIC = {
    "behind_router": "others cannot dial this node, which is usual behind a router",
    "crowded": "this swarm has as many public nodes of this network as it takes, so this node is a leaf",
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ROOM_S = 5.0  # Between two looks at a disk that was full
RETRY_S = 600.0  # Then it is tried anyway: the weights may lie on another disk
FREED_BYTES = 1 << 20  # Less than the smallest amount that a line asks for
MEMORY_SHARE = 0.5  # Of what is free, for the weights: their owner goes on working


def weights_directory(state_dir: Path, swarm: str) -> Path:
    """Return the directory for the weights of a swarm. Blocking. Remove the weights of swarms that this node has left,
    gigabytes that will never be read again."""
    directory = state_dir / SWARMS / swarm
    for old in directory.parent.glob("*"):
        if old != directory:
            forget_place(old)
            shutil.rmtree(old)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


class DataPlane:
    """The routes and streams of the current receiver."""

    def __init__(
        self,
        station: Station,
        *,
        say: Callable[[str], None],
        base: BaseModel | None,
        weights: Wanted = "auto",
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        self._weights = weights
        self._memory_share = memory_share
        self._station = station
        self._say = say
        self._base = base
        self._pool = coding_pool()
        self._receiver: Receiver | None = None
        self._server = VersionServer(
            lambda: self._receiver.upkeep.store if self._receiver else None,
            lambda: self._receiver.upkeep.weights if self._receiver else None,
            self._pool,
            station,
        )

    def routes(self) -> list[web.RouteDef]:
        return self._server.routes()

    async def accept(self, incoming: Incoming) -> None:
        if self._receiver is not None:
            await self._receiver.accept(incoming)
        else:
            incoming.sock.close()
            incoming.leave()

    @asynccontextmanager
    async def receiving(
        self, directory: Path, learner_key: bytes, threads: int | None = None
    ) -> AsyncIterator[Receiver]:
        """Receive the versions of a swarm for as long as the block runs, and code with `threads` at most."""
        self.close()
        self._pool = self._server.pool = coding_pool(min(threads, spare_threads()) if threads else None)
        receiver = self._receiver = Receiver(
            directory,
            learner_key,
            self._station,
            pool=self._pool,
            say=self._say,
            base=self._base,
            place=partial(self._place, directory),
        )
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(receiver.run())
                try:
                    yield receiver
                finally:
                    task.cancel()
        finally:
            self._receiver = None

    def _place(self, directory: Path, nbytes: int) -> Path | None:
        place, line = place_of_map(directory, nbytes, self._weights, self._memory_share)
        if line:
            self._say(line)
        return place

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, Any]:
        return self._receiver.status() if self._receiver else {"streams": 0}


class JoiningNode(ABC):
    """A node that joins swarms. `say` gets lines for the person at the terminal."""

    role: Role

    def __init__(self, config: JoinConfig, say: Callable[[str], None]) -> None:
        self._config = config
        where_to_listen(config)  # Refuses what is no address
        self._log = SaidLog(say)
        self._say = self._log.say
        self._stop = asyncio.Event()
        self._again = asyncio.Event()
        self._holds = Holds()
        self._card: Card | None = None
        self._said_router = False
        self._is_elsewhere = False
        self.is_up = False
        """Whether `status` may be called."""

    async def run(self) -> None:
        """Take part in one swarm after another, until a run is over or a stop is requested."""
        state = StateDirectory.claim(self._config.state_dir, self.role)
        self._directory = state.path
        self._log.open(state.path)
        try:
            watch = Watch(state.path, self._config, holding=self._holds, say=self._say, on_change=self._take_limits)
            watch.look()
            self._config = watch.config
            name = self._config.base
            base = BaseModel(await asyncio.to_thread(find_base, name)) if name is not None else None
            self._network = NodeNetwork(state.path, self.role, self._config, say=self._say, emit=self._emit)
            self._data = DataPlane(
                self._network.station,
                say=self._say,
                base=base,
                weights=self._config.weights,
                memory_share=self.memory_share(),
            )
            await self._network.start(self._data.routes(), self.status, on_stream=self._data.accept)
            self._take_limits(self._config)
            works = [watch.run(), watch_clocks(self._say, self._again.set), self._keep_given(Given(state.path / FILE))]
            if self._config.spot:
                works.append(watch_notices(self._taken_away, self._say))
            watching = [asyncio.create_task(work) for work in works]
            for task in watching:
                task.add_done_callback(self._say_unwatched)
            try:
                self.is_up = True
                self._say(f"{self.role} {self._network.node}; status: echo-node status {self._network.address.url}")
                async with control(state.path, self._asked, self._say_uncontrolled):
                    await self._swarms()
                if self._is_elsewhere:
                    raise InUseElsewhere
            finally:
                for task in watching:
                    task.cancel()
                # The other process goes on as this node: it has not left.
                await self._network.stop(leave=not self._is_elsewhere)
                self._data.close()
        finally:
            state.release()

    def _take_limits(self, config: JoinConfig) -> None:
        """Keep to the limits of `config` from now on."""
        before, self._config = self._config, config
        station = self._network.station
        for pace, mbit in ((station.upload, config.max_upload), (station.download, config.max_download)):
            pace.change(mbit * 1e6 / 8 if mbit else None)
        set_most_bytes(self._directory / SWARMS, int(config.max_disk * 1e9) if config.max_disk else None)
        # At the start only if it was asked for: this process may have been started with a niceness already.
        asked = config.nice != before.nice if self.is_up else config.nice > 0
        if asked and not give_way(config.nice, self.status().get("engine_pid") if self.is_up else None):
            self._say("the system does not let this process give way less than before: start the node again for that")
        if any(getattr(before, name) != getattr(config, name) for name in BY_REJOINING):
            self._say("joining again with these limits")
            self._again.set()

    async def _keep_given(self, given: Given) -> None:
        """Keep for this machine's owner what it gives, now and then and at the end."""
        began, is_over = time.monotonic(), False
        while not is_over:
            try:
                await asyncio.sleep(KEEP_S)
            except asyncio.CancelledError:
                is_over = True
            if self._card is not None:
                own = {"passed_bytes": self._network.station.upload.total_bytes, "seconds": time.monotonic() - began}
                with suppress(OSError):  # A full disk: the next write has it too
                    given.keep(str(self._network.status()["swarm"]), purpose(self._card), own | self.drawn())

    def _taken_away(self, cloud: str) -> None:
        self._say(f"{cloud} is about to take this machine away")
        self.request_stop(LEAVE_S)

    def drawn(self) -> dict[str, float]:
        """Return the counts of what a sampler has drawn in this process."""
        return {}

    def _say_uncontrolled(self, error: OSError) -> None:
        self._say(f"pause, resume, finish and status do not reach this node: no socket in {self._directory} ({error})")

    def _say_unwatched(self, done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._say(f"limits and clocks are not watched any more ({error!r}): start the node again")

    def memory_share(self) -> float:
        """Return which share of the free memory the weights may take."""
        return MEMORY_SHARE

    async def _asked(self, request: dict[str, Any]) -> str:
        """Do what the owner asks for over the control socket, and return a line about it."""
        match request:
            case {"do": "where"}:
                return self._network.address.url
            case {"do": "pause" | "resume"}:
                raise UserError(f"a {self.role} draws nothing that could be paused: `echo-node leave` ends it")
            case {"do": "finish"}:
                self.request_stop(FINISH_S)
                return "finishing the samples under way, then leaving"
            case {"do": "leave"}:
                self.request_stop(0.0)
                return "leaving; others draw the samples that were under way"
        raise UserError("this node does not know that request: is it of another release?")

    def request_stop(self, grace_s: float | None = None) -> bool:
        """Leave, and finish before what ends within the grace; None: that of the settings."""
        self._stop.set()
        self._say("leaving; telling the others (again to leave at once)")
        return True

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Return the node's status. The keys are described in docs/protocol.md."""

    @abstractmethod
    def _set_state(self, state: str) -> None: ...

    @abstractmethod
    async def _take_part(self, found: Greeting, receiver: Receiver) -> bool:
        """Work for one swarm. Return True if its run is over, False to look for a swarm again."""

    async def _swarms(self) -> None:
        while not self._stop.is_set():
            self._set_state("looking for the swarm")
            found = await unless_stopped(self._stop, self._network.find())
            if found is None:
                return
            self._say(self._network.trust_line())
            key = found.hello.learner_key
            self._show_card(found.hello.card, key)
            full = ""
            swarm = self._network.swarm(key, found.learner.record.round_s)
            is_over: bool | None = False
            self._again.clear()
            try:
                directory = await asyncio.to_thread(weights_directory, self._directory, found.hello.swarm)
                async with swarm, self._data.receiving(directory, key, self._config.threads) as receiver:
                    is_over = await unless_stopped(self._again, self._take_part(found, receiver))
            except* OtherModel as changed:
                self._say(f"{first_fault(changed)}; joining it again")
            except* (DiskFull, OSError) as failed:
                fault = first_fault(failed)
                if isinstance(fault, OSError) and fault.errno not in NO_ROOM:
                    raise
                full = str(fault)
            if full:
                await unless_stopped(self._stop, self._wait_for_room(full))
            if is_over:
                self._say("the run is finished; thank you")
                return

    async def _wait_for_room(self, fault: str) -> None:
        """Pause until the disk has more room than now, or its owner allows more, or long enough to try again."""
        self._say(f"paused: {fault}")
        self._set_state(f"paused: {fault}")
        allowed, free = self._config.max_disk, await asyncio.to_thread(free_bytes, self._directory)
        for _ in range(int(RETRY_S / ROOM_S)):
            await asyncio.sleep(ROOM_S)
            has_more = await asyncio.to_thread(free_bytes, self._directory) >= free + FREED_BYTES
            if has_more or self._config.max_disk != allowed:
                self._say("there is room again: going on")
                return

    def _show_card(self, sealed: bytes, learner_key: bytes) -> None:
        self._network.card = sealed
        card = open_card(sealed, learner_key)
        # Once: a node that loses its swarm finds the same one again.
        if card is not None and card != self._card:
            self._card = card
            for line in card_lines(card, draws=self.role == "sampler", has_base=self._config.base is not None):
                self._say(line)

    def _emit(self, kind: str, **fields: Any) -> None:
        if kind == "reachable":
            self._say(f"others can dial this node at {fields['address']}: it takes part as a public node")
        elif kind in NO_PUBLIC and not self._said_router:
            self._said_router = True
            self._say(f"{NO_PUBLIC[kind]}: it dials them, and all works")
        elif kind == "unreachable":
            self._say("others cannot dial this node any more: it takes part as a leaf")
        elif kind == "doubled" and self.role == "relay":
            # The learner tells a sampler, because it knows which of the two came second.
            self._is_elsewhere = True
            self._stop.set()
