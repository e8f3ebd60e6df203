"""The caps on bodies of a learner's routes, behind a NodeServer: 413 over them, 400 for junk, and both counted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from swarm.errors import ProtocolError
from swarm.gossip.records import GOSSIP_BODY_BYTES
from swarm.net.client import PeerClient, session_route
from swarm.net.server import NodeServer
from swarm.net.sessions import AUTH_HEADER
from swarm.types import Address
from swarm.wire import CONTROL_BODY_BYTES, PROTOCOL, PROTOCOL_HEADER, ROLLOUT_BODY_BYTES
from tests.builders import OTHER_KEY
from tests.learner_face import Learner
from tests.unit.node.test_network import learner as gossiping

CONTROL_PATHS = ("/v1/leases", "/v1/beat", "/v1/release")

JUNK = b"\xc1"
"""The one byte that no msgpack contains."""


@asynccontextmanager
async def rollout_routes() -> AsyncIterator[tuple[PeerClient, NodeServer]]:
    """The routes of a learner that samplers call, and a client that signs."""
    learner = Learner()
    await learner.open()
    server = NodeServer([session_route(learner.sessions), *learner.service.routes()], learner.service.status)
    address = Address(host="127.0.0.1", port=await server.start("127.0.0.1", 0))
    try:
        async with PeerClient(address, key=OTHER_KEY, server=learner.key.node_id) as peer:
            yield peer, server
    finally:
        await server.stop()


async def refusal(peer: PeerClient, path: str, body: bytes) -> str:
    with pytest.raises(ProtocolError) as refused:
        await peer.post(path, body, cap_bytes=1000, timeout_s=20.0)
    return str(refused.value)


async def in_parts(size: int) -> AsyncIterator[bytes]:
    """A body of that many bytes whose length is not stated."""
    part = 16 * 1024
    for at in range(0, size, part):
        yield JUNK * min(part, size - at)


def sizes(cap: int) -> Iterator[tuple[int, int]]:
    """Bodies of junk at the cap and a byte over it, and their answers."""
    yield cap, 400
    yield cap + 1, 413


@pytest.mark.parametrize("path", CONTROL_PATHS)
async def test_a_control_body_over_its_cap_is_refused_and_counted(path: str) -> None:
    assert CONTROL_BODY_BYTES == 256 * 1024
    async with rollout_routes() as (peer, server):
        for size, status in sizes(CONTROL_BODY_BYTES):
            assert f"status {status}" in await refusal(peer, path, JUNK * size)
        assert server.refused() == {"malformed": 1, "too_large": 1}


async def test_a_gossip_body_over_its_cap_is_refused_and_counted(tmp_path: Path) -> None:
    assert GOSSIP_BODY_BYTES == 64 * 1024
    async with gossiping(tmp_path) as lead, PeerClient(lead.address, key=OTHER_KEY, server=lead.node) as peer:
        for size, status in sizes(GOSSIP_BODY_BYTES):
            assert f"status {status}" in await refusal(peer, "/v1/gossip", JUNK * size)
        status_json = await peer.get("/v1/status", cap_bytes=100_000, timeout_s=20.0)
        assert json.loads(status_json)["refused"] == {"malformed": 1, "too_large": 1}


async def test_a_body_of_rollouts_over_its_cap_is_refused_and_counted() -> None:
    assert ROLLOUT_BODY_BYTES == 8 * 1024 * 1024
    async with rollout_routes() as (peer, server):
        assert "status 413" in await refusal(peer, "/v1/steps", bytes(ROLLOUT_BODY_BYTES + 1))
        assert server.refused() == {"too_large": 1}
        assert "status 400" in await refusal(peer, "/v1/steps", JUNK)
        assert server.refused() == {"too_large": 1, "malformed": 1}


async def unstated(peer: PeerClient, path: str, size: int) -> tuple[int, str]:
    """What is answered to a body of that size whose length is not stated, with a signature of no meaning: the cap
    comes before it."""
    headers = {PROTOCOL_HEADER: str(PROTOCOL), AUTH_HEADER: await peer.signed_header("POST", path, b"")}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as raw,
        raw.post(peer.base_url + path, data=in_parts(size), headers=headers) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize("path", CONTROL_PATHS)
async def test_a_control_body_that_states_no_length_is_cut_at_the_cap(path: str) -> None:
    async with rollout_routes() as (peer, server):
        answer = await unstated(peer, path, CONTROL_BODY_BYTES + 1)
        assert answer == (413, f"a body is over the cap of {CONTROL_BODY_BYTES} bytes")
        assert server.refused() == {"too_large": 1}


async def test_a_gossip_body_that_states_no_length_is_cut_at_the_cap(tmp_path: Path) -> None:
    async with gossiping(tmp_path) as lead, PeerClient(lead.address, key=OTHER_KEY, server=lead.node) as peer:
        answer = await unstated(peer, "/v1/gossip", GOSSIP_BODY_BYTES + 1)
        assert answer == (413, f"a body is over the cap of {GOSSIP_BODY_BYTES} bytes")
