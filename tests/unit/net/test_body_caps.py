"""The caps on bodies of a learner's routes, behind a NodeServer: 413 over them, 400 for junk, and both counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarm.errors import ProtocolError
from swarm.gossip.records import GOSSIP_BODY_BYTES
from swarm.net.client import PeerClient, plain_address, session_route
from swarm.net.server import NodeServer
from swarm.wire import CONTROL_BODY_BYTES, ROLLOUT_BODY_BYTES
from tests.builders import OTHER_KEY
from tests.learner_face import Learner
from tests.unit.net.test_client import serving
from tests.unit.node.test_network import learner as gossiping

JUNK = b"\xc1"
"""The one byte that no msgpack contains."""


@asynccontextmanager
async def rollout_routes() -> AsyncIterator[tuple[PeerClient, NodeServer]]:
    """The routes of a learner that samplers call, and a client that signs."""
    learner = Learner()
    await learner.open()
    async with (
        serving(session_route(learner.sessions), *learner.service.routes()) as (url, server),
        PeerClient(plain_address(url), key=OTHER_KEY, server=learner.key.node_id) as peer,
    ):
        yield peer, server


async def refusal(peer: PeerClient, path: str, body: bytes) -> str:
    with pytest.raises(ProtocolError) as refused:
        await peer.post(path, body, cap_bytes=1000, timeout_s=20.0)
    return str(refused.value)


@pytest.mark.parametrize(
    ("path", "cap"),
    [
        ("/v1/leases", CONTROL_BODY_BYTES),
        ("/v1/beat", CONTROL_BODY_BYTES),
        ("/v1/release", CONTROL_BODY_BYTES),
        ("/v1/steps", ROLLOUT_BODY_BYTES),
    ],
)
async def test_a_body_over_its_cap_is_refused_and_counted(path: str, cap: int) -> None:
    async with rollout_routes() as (peer, server):
        assert "status 400" in await refusal(peer, path, JUNK * (cap if cap == CONTROL_BODY_BYTES else 1))
        assert "status 413" in await refusal(peer, path, JUNK * (cap + 1))
        assert server.refused() == {"malformed": 1, "too_large": 1}


async def test_a_gossip_body_over_its_cap_is_refused_and_counted(tmp_path: Path) -> None:
    async with gossiping(tmp_path) as lead, PeerClient(lead.address, key=OTHER_KEY, server=lead.node) as peer:
        assert "status 400" in await refusal(peer, "/v1/gossip", JUNK * GOSSIP_BODY_BYTES)
        assert "status 413" in await refusal(peer, "/v1/gossip", JUNK * (GOSSIP_BODY_BYTES + 1))
        assert lead._server.refused() == {"malformed": 1, "too_large": 1}
