"""The first word between two nodes: who the learner is and which swarm this is."""

from __future__ import annotations

from aiohttp import web

from swarm.errors import ProtocolError
from swarm.http import PeerClient, binary
from swarm.signing import PublicKeyField, swarm_id_of
from swarm.types import Id, Role, Seconds
from swarm.wire import PROTOCOL, Message, decode, encode

HELLO_BYTES = 4096
HELLO_S = 10.0
"""Time limit of a hello: a learner that loads a large model still answers at once."""


class Hello(Message, frozen=True):
    """What a learner says of itself. `beat_s` is how often it wants to hear from a sampler."""

    protocol: int
    role: Role
    swarm: Id
    learner_key: PublicKeyField
    beat_s: Seconds


def hello_route(learner_key: bytes, beat_s: float) -> web.RouteDef:
    """Answers GET /v1/hello on a learner."""
    hello = Hello(
        protocol=PROTOCOL,
        role="learner",
        swarm=swarm_id_of(learner_key),
        learner_key=learner_key,
        beat_s=beat_s,
    )

    async def answer(request: web.Request) -> web.Response:
        return binary(encode(hello))

    return web.get("/v1/hello", answer)


async def say_hello(peer: PeerClient) -> Hello:
    """The learner behind `peer`. Another protocol is a UserError that says which side to upgrade."""
    hello = decode(await peer.get("/v1/hello", cap_bytes=HELLO_BYTES, timeout_s=HELLO_S), Hello, cap_bytes=HELLO_BYTES)
    if hello.role != "learner" or hello.swarm != swarm_id_of(hello.learner_key):
        raise ProtocolError(f"{peer.base_url} does not say which learner it is")
    return hello
