"""A RolloutService behind a server on loopback, for tests of the learner's HTTP face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from swarm.net.client import PeerClient, guard, session_route
from swarm.net.sessions import AUTH_HEADER, ServerSessions
from swarm.net.signing import SigningKey
from swarm.rollout.api import RolloutService
from swarm.rollout.intake import Intake, IntakeLimits
from swarm.rollout.messages import Answer, Did, Offer
from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.plane.plane import RolloutPlane
from swarm.rollout.scoring import Stepper
from swarm.rollout.tally import SamplerWatch
from swarm.sampler.client import RolloutClient
from swarm.types import Address, Lease, NodeId, Score, Unscored
from swarm.wire import PROTOCOL, PROTOCOL_HEADER
from tests.builders import KEY, OTHER_KEY, ListJournal, answering, answers, new_plane, v

ALICE, BOB = KEY.node_id, OTHER_KEY.node_id

WAIT_S = 20.0
"""Questions may be held open this long; no test waits for it."""


class Learner(SamplerWatch):
    """A RolloutService behind a server on loopback, and clients for it."""

    def __init__(self, *, limits: IntakeLimits | None = None) -> None:
        self.key = SigningKey.generate()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.gone_nodes: list[NodeId] = []
        self.offers: dict[NodeId, Offer] = {}
        self.lengths: list[int] = []
        self.did: list[tuple[NodeId, tuple[Did, ...], str]] = []
        self.sessions = ServerSessions(self.key, b"")
        self.plane: RolloutPlane = new_plane(newest=None)
        self.unscorable: set[str] = set()
        self.journal = ListJournal()
        self.service = RolloutService(
            sessions=self.sessions,
            journal=self.journal,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            watch=self,
            heard=lambda node, beat, idle: self.did.append((node, beat.did, idle)),
        )
        self.service._intake = Intake(limits)
        self.port = 0
        self.peers: dict[NodeId, PeerClient] = {}

    def client(self, node: NodeId, *, named: NodeId | None = None, engine: str = "") -> RolloutClient:
        """Calls signed by `node`, which name it, or `named` in its place, and this class of engine."""
        return RolloutClient(self.peers[node], named or node, engine)

    async def open(self, stepper: Stepper | None = None) -> None:
        self.service.open(self.plane, self._score, stepper=stepper)
        await self.service.published(v(0))

    def offered(self, node: NodeId, offer: Offer) -> None:
        self.offers[node] = offer

    def accepted(self, node: NodeId, tokens: Sequence[int]) -> None:
        self.lengths += tokens

    def gone(self, node: NodeId, *, vanished: bool) -> None:
        self.gone_nodes.append(node)

    async def knows(self, node: NodeId) -> None:
        """Until a request of `node` has arrived."""
        await self.shows(lambda status: node in self.service.samplers)

    async def shows(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Until `status` is as wanted."""
        while not wanted(self.service.status()):  # noqa: ASYNC110 - the service has no event for a test to wait on
            await asyncio.sleep(0)

    async def begin_submission(
        self, node: NodeId, *, stated: int = 1000, sent: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The head of a submission of `node` that states its size, and what of the body is `sent`."""
        header = await self.peers[node].signed_header("POST", "/v1/steps", sent)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST /v1/steps HTTP/1.1\r\nHost: learner\r\nContent-Length: {stated}\r\n"
            f"{PROTOCOL_HEADER}: {PROTOCOL}\r\n{AUTH_HEADER}: {header}\r\n\r\n"
        )
        writer.write(head.encode() + sent)
        return reader, writer

    async def _score(self, wanted: Sequence[ScoreWanted]) -> list[Score | Unscored]:
        return [
            Unscored(reason="no") if one.rollout.rollout_id in self.unscorable else Score(reward=0.5, exact=False)
            for one in wanted
        ]


@asynccontextmanager
async def serving(learner: Learner) -> AsyncIterator[Learner]:
    """`learner` behind its server, with a signing client for ALICE and one for BOB."""
    app = web.Application(middlewares=[guard])
    app.add_routes([session_route(learner.sessions), *learner.service.routes()])
    runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    learner.port = runner.addresses[0][1]
    address = Address(host="127.0.0.1", port=learner.port)
    async with (
        PeerClient(address, key=KEY, server=learner.key.node_id) as learner.peers[ALICE],
        PeerClient(address, key=OTHER_KEY, server=learner.key.node_id) as learner.peers[BOB],
    ):
        yield learner
    await runner.cleanup()


async def leases_for(learner: Learner, node: NodeId, capacity: int) -> list[Lease]:
    given = await learner.client(node).ask(v(0), capacity, WAIT_S, holding=())
    assert isinstance(given, list), given
    return given


def answers_to(given: list[Lease]) -> list[Answer]:
    return [answering(*one) for one in answers(given, 0)]
