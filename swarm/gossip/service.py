"""Gossip on an event loop: it performs the core's effects, answers calls, holds polls open, and calls nodes back.

One task ticks the core when it is due. Every call runs in its own task, which ends within the call's time limit.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from aiohttp import web

from swarm.errors import PeerUnreachable, ProtocolError
from swarm.gossip.membership import Membership
from swarm.gossip.reachability import CROWDED, DialBack, DialBackLimit, DialBackReply, Reachability
from swarm.gossip.records import (
    GOSSIP_BODY_BYTES,
    Appeared,
    Died,
    Doubled,
    Effect,
    Exchange,
    ExchangeReply,
    GenerationRaised,
    Greet,
    LeafGone,
    Post,
    Rejected,
    SignedRecord,
    Wake,
)
from swarm.net.client import Crowded, HttpPeer, binary, read_signed
from swarm.net.sessions import ServerSessions
from swarm.types import Address, NodeId
from swarm.wire import decode, encode

DIAL_BACK_BYTES = 1024
DIAL_BACK_S = 10.0  # Time limit for asking to be called back: a connection each way
KNOCK_S = 5.0  # Time limit for calling a node back
FAREWELL_S = 1.0  # A node that leaves waits this long for its last word to arrive


class GossipService:
    """The shell of one membership at a time. `peer_at(node, address)` gives a signing client. `greet` says hello to a
    bootstrap. `knock` calls a node back and says whether it proved who it is. `emit` writes an event. `on_generation`
    persists before it returns."""

    def __init__(
        self,
        *,
        sessions: ServerSessions,
        peer_at: Callable[[NodeId, Address], HttpPeer],
        greet: Callable[[], Awaitable[tuple[SignedRecord, Address] | None]],
        knock: Callable[[NodeId, Address], Awaitable[bool]],
        emit: Callable[..., None],
        on_generation: Callable[[int], None],
    ) -> None:
        self._sessions = sessions
        self._peer_at = peer_at
        self._greet = greet
        self._knock = knock
        self._emit = emit
        self._on_generation = on_generation
        self._core: Membership | None = None
        self._reachability: Reachability | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sooner = asyncio.Event()
        self._awake = asyncio.Event()
        self.rejected: Counter[str] = Counter()

    @property
    def core(self) -> Membership:
        assert self._core is not None
        return self._core

    @property
    def is_open(self) -> bool:
        return self._core is not None

    def open(self, core: Membership, reachability: Reachability | None, limit: DialBackLimit) -> None:
        """Take part as `core`. Without `reachability` the node never asks to be called back; `limit` is for others."""
        self._core = core
        self._limit = limit
        self._reachability = reachability

    async def run(self) -> None:
        while True:
            core, now = self.core, time.monotonic()
            self.perform(core.tick(now=now))
            self._ask_for_dial_back(now)
            due = min([core.deadline(), *([self._reachability.deadline()] if self._reachability else [])])
            self._sooner.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._sooner.wait()

    async def close(self, *, leave: bool) -> None:
        """End all calls. With `leave`, tell other nodes first."""
        if leave and self._core is not None:
            before = set(self._tasks)
            self.perform(self._core.leave(now=time.monotonic()))
            if farewells := self._tasks - before:
                await asyncio.wait(farewells, timeout=FAREWELL_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._core = self._reachability = None
        self._wake()

    async def news(self, patience_s: float) -> None:
        """Wait until a head appears or the learner moves, for at most `patience_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._awake.wait()

    # -- answering -------------------------------------------------------------------------------------------

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/gossip", self._post_gossip), web.post("/v1/dial-back", self._post_dial_back)]

    async def _post_gossip(self, request: web.Request) -> web.Response:
        caller, body = await read_signed(request, GOSSIP_BODY_BYTES, self._sessions)
        message = decode(body, Exchange, cap_bytes=GOSSIP_BODY_BYTES)
        if self._core is None:
            return _starting()
        core, host, now = self._core, request.remote or "", time.monotonic()
        if not core.affords(host, message, now=now):
            raise Crowded("this node has no more time for the gossip of your network; try again in a second")
        self.perform(core.receive(caller, message, host=host, now=now))
        with suppress(TimeoutError):
            async with asyncio.timeout(min(message.hold_s, core.rules.longest_hold_s)):
                while core is self._core and core.holds(message):
                    await self._awake.wait()
        return binary(encode(core.answer(caller, message, now=time.monotonic())))

    async def _post_dial_back(self, request: web.Request) -> web.Response:
        caller, body = await read_signed(request, DIAL_BACK_BYTES, self._sessions)
        asked = decode(body, DialBack, cap_bytes=DIAL_BACK_BYTES)
        if self._core is None:
            return _starting()
        host, table, reached = request.remote or "", self._core.view.table, False
        address = Address(host=host, port=asked.port, fingerprint=asked.fingerprint)
        if table.find(caller) is None and not table.has_room(address):
            refused = CROWDED
        else:
            refused = self._limit.refusal(host, now=time.monotonic())
        if refused:
            self.rejected["dial_back"] += 1
        else:
            reached = await self._knock(caller, address)
            if reached:
                table.prove(caller, lambda claimed: claimed == address)
        return binary(encode(DialBackReply(host=host, reached=reached, refused=refused)))

    # -- effects ---------------------------------------------------------------------------------------------

    def perform(self, effects: Iterable[Effect]) -> None:
        """Perform what the core asked for, and make `run` look again when the core is due."""
        self._sooner.set()
        for effect in effects:
            match effect:
                case Post():
                    self._start(self._call(self.core, effect))
                case Greet():
                    self._start(self._say_hello(self.core))
                case Wake():
                    self._wake()
                case Appeared():
                    self._emit("public_appeared", node=effect.signed.node, role=effect.signed.record.role)
                case Died():
                    self._emit("public_died", node=effect.node, reason=effect.reason)
                case LeafGone():
                    self._emit("leaf_gone", node=effect.node)
                case Doubled():
                    self._emit("doubled")
                case GenerationRaised():
                    self._on_generation(effect.generation)
                case Rejected():
                    self.rejected[effect.reason] += 1

    async def _call(self, core: Membership, call: Post) -> None:
        try:
            peer = self._peer_at(call.node, call.address)
            data = await peer.post(
                "/v1/gossip", encode(call.message), cap_bytes=GOSSIP_BODY_BYTES, timeout_s=call.timeout_s
            )
            reply = decode(data, ExchangeReply, cap_bytes=GOSSIP_BODY_BYTES)
        except ProtocolError:
            self.rejected["bad_answer"] += 1
            effects = core.failed(call, now=time.monotonic())
        except PeerUnreachable:
            effects = core.failed(call, now=time.monotonic())
        else:
            effects = core.answered(call, reply, now=time.monotonic())
        if core is self._core:
            self.perform(effects)

    async def _say_hello(self, core: Membership) -> None:
        found = await self._greet()
        if core is not self._core:
            return
        if found is None:
            core.greet_failed(now=time.monotonic())
            self._sooner.set()
        else:
            self.perform(core.introduced(*found, now=time.monotonic()))

    def _wake(self) -> None:
        """Let every held poll look again. Polls that come later wait for the next call."""
        self._awake.set()
        self._awake = asyncio.Event()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            # No peer's input gets here: this is a bug of ours, which must not be hidden.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a gossip task failed", "exception": fault, "task": task}
            )

    # -- being called back -----------------------------------------------------------------------------------

    def _ask_for_dial_back(self, now: float) -> None:
        if self._reachability is None:
            return
        view = self.core.view
        publics = {peer.signed.node: peer for peer in view.reached(now)}
        witness = self._reachability.ask(list(publics), now=now)
        if witness is not None:
            addresses = publics[witness].addresses
            self._start(self._dial_back(self.core, self._reachability, witness, secrets.choice(addresses)))

    async def _dial_back(self, core: Membership, reachability: Reachability, witness: NodeId, address: Address) -> None:
        message = encode(reachability.message())
        try:
            peer = self._peer_at(witness, address)
            data = await peer.post("/v1/dial-back", message, cap_bytes=DIAL_BACK_BYTES, timeout_s=DIAL_BACK_S)
            reply = decode(data, DialBackReply, cap_bytes=DIAL_BACK_BYTES)
        except (PeerUnreachable, ProtocolError):
            return
        if not (reply.reached or reachability.address) and reply.refused in ("", CROWDED):
            self._emit("crowded" if reply.refused else "behind_router")
        now = time.monotonic()
        if core is self._core and reachability.answered(witness, reply, len(core.view.table), now=now):
            found = reachability.address
            self._emit("reachable" if found else "unreachable", address=found.authority if found else None)
            self.perform(core.set_reachability("public" if found else "leaf", (found,) if found else (), now=now))


def _starting() -> web.Response:
    return web.Response(status=503, text="this node has not found its swarm yet", headers={"Retry-After": "2"})
