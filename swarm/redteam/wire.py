"""Attackers that are only clients: each calls the learner with a key of its own, and returns what stopped it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from swarm.errors import ProtocolError
from swarm.net.client import Busy, PeerClient, plain_address
from swarm.net.sessions import AUTH_HEADER
from swarm.net.signing import SigningKey
from swarm.net.wire import CONTROL_BODY_BYTES, PROTOCOL, PROTOCOL_HEADER, ROLLOUT_UNPACKED_BYTES, compress, encode
from swarm.node.bootstrap import say_hello
from swarm.rollout.client import SUBMIT_PATH, Answer, Refused, RolloutClient, SealedLease
from swarm.rollout.messages import MAX_SUBMITTED, Beat
from swarm.types import NodeId, Rollout, Span, VersionId

CALL_S = 30.0
AGAIN_S = 1.0  # Between two questions, while the run has no version or no leases
SLOW_S = 0.5  # Between two bytes of a slow body
FLOOD = 16  # Submissions of the largest number of rollouts; the learner takes three before it asks for patience
IDENTITIES = 8  # Of one Sybil, one after another
INVENTED = -0.7  # Nats: near the log-probs of a policy that has half learned
BEAT_PATH = "/v1/beat"
MEASURED = "transformers/float32/cpu"  # A class that the audit judges; another would only be watched


@dataclass
class Client:
    """One who calls the learner at `url`. `nodes` are all identities that it has had."""

    url: str
    nodes: set[NodeId] = field(default_factory=set)

    @asynccontextmanager
    async def identity(self) -> AsyncIterator[tuple[PeerClient, RolloutClient]]:
        """Call the learner as somebody new, once it has a version."""
        key = SigningKey.generate()
        async with PeerClient(plain_address(self.url)) as stranger:
            heard = await say_hello(stranger)
        async with PeerClient(plain_address(self.url), key=key, server=heard.signed.node) as peer:
            client = RolloutClient(peer, key.node_id, heard.hello.learner_key, engine_class=lambda: MEASURED)
            await newest(client)
            self.nodes.add(key.node_id)
            yield peer, client

    async def post(self, peer: PeerClient, path: str, body: Any, header: str = "") -> int:
        """Return the status of the answer. A body that is no bytes is signed as an empty one."""
        signed = header or await peer.signed_header("POST", path, body if isinstance(body, bytes) else b"")
        headers, limit = {PROTOCOL_HEADER: str(PROTOCOL), AUTH_HEADER: signed}, aiohttp.ClientTimeout(total=CALL_S)
        async with aiohttp.request("POST", self.url + path, data=body, headers=headers, timeout=limit) as answer:
            return answer.status


async def newest(client: RolloutClient) -> VersionId:
    while True:
        if (version := (await client.beat(None, 0, 0.0)).newest) is not None:
            return version
        await asyncio.sleep(AGAIN_S)


async def invented(client: RolloutClient) -> list[Answer]:
    """Wait for leases. Return well-formed rollouts for them that no model drew."""
    while True:
        version = await newest(client)
        granted = await client.ask(version, 16, AGAIN_S, holding=())
        if not isinstance(granted, Refused):
            return [Answer(lease=one, rollouts=tuple(_rollouts(one, version))) for one in granted]
        await asyncio.sleep(AGAIN_S)


def _rollouts(sealed: SealedLease, version: VersionId) -> list[Rollout]:
    rules = sealed.lease.rules
    tokens = array("i", [*[5] * (rules.max_new_tokens - 1), rules.stop_token_ids[0]])
    said: dict[str, Any] = {
        "token_ids": tokens.tobytes(),
        "logprobs": array("f", [INVENTED] * len(tokens)).tobytes(),
        "spans": (Span(version=version, start=0, end=len(tokens)),),
    }
    group_id = sealed.lease.group_id
    return [Rollout(group_id=group_id, index=one.index, finish="stop", **said) for one in sealed.lease.samples]


async def floods(client: Client) -> str:
    """Hand in one answer thousands of times."""
    async with client.identity() as (_, sampler):
        first = (await invented(sampler))[0]
        with suppress(Busy):
            for _ in range(FLOOD):
                await sampler.submit([Answer(lease=first.lease, rollouts=first.rollouts[:1] * MAX_SUBMITTED)])
            return ""
    return "status 429"


async def slow_bodies(client: Client) -> str:
    """Send a byte now and then."""

    async def slowly() -> AsyncIterator[bytes]:
        while True:
            yield b"\0"
            await asyncio.sleep(SLOW_S)

    async with client.identity() as (peer, _):
        try:
            return "status 408" if await client.post(peer, BEAT_PATH, slowly()) == 408 else ""
        except aiohttp.ClientError:
            return "connection closed"


async def bombs(client: Client) -> str:
    """Send a body over the cap, a frame that unpacks to more than the cap, and msgpack that nests or promises much."""
    large, packed = b"\0" * (CONTROL_BODY_BYTES + 1), compress(bytes(2 * ROLLOUT_UNPACKED_BYTES))
    bodies = [(BEAT_PATH, large), (SUBMIT_PATH, packed), (BEAT_PATH, b"\x91" * 100_000), (BEAT_PATH, b"\xdd" * 5)]
    async with client.identity() as (peer, _):
        found = [await client.post(peer, path, body) for path, body in bodies]
    return "status 413, 400" if found == [413, 413, 400, 400] else ""


async def replays(client: Client) -> str:
    """Send a signed request a second time, as one who recorded it would."""
    async with client.identity() as (peer, _):
        (node,) = client.nodes
        body = encode(Beat(node=node, installed=None, samples=0, rollouts_per_s=0.0))
        header = await peer.signed_header("POST", BEAT_PATH, body)
        found = [await client.post(peer, BEAT_PATH, body, header) for _ in range(2)]
    return "status 401" if found == [200, 401] else ""


async def sybils(client: Client) -> str:
    """Hand in invented rollouts as somebody new each time. What becomes of these is the learner's to say."""
    for _ in range(IDENTITIES):
        async with client.identity() as (_, sampler):
            with suppress(ProtocolError):
                await sampler.submit(await invented(sampler))
    return ""


WIRE: dict[str, Callable[[Client], Coroutine[Any, Any, str]]] = {
    "floods": floods,
    "slow-bodies": slow_bodies,
    "bombs": bombs,
    "replays": replays,
    "sybils": sybils,
}
