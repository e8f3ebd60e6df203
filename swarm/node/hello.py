"""The first word between two nodes: which swarm this is, who its learner is, and who answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from aiohttp import web

from swarm.errors import ProtocolError
from swarm.gossip.records import RECORD_BYTES, SignedRecord, open_record
from swarm.http import Peer, binary
from swarm.signing import PublicKeyField, swarm_id_of
from swarm.types import Id, Role, Seconds, SwarmId
from swarm.wire import PROTOCOL, Message, decode, encode

HELLO_PATH = "/v1/hello"

HELLO_BYTES = 4096

HELLO_S = 10.0
"""Time limit of a hello: a learner that loads a large model still answers at once."""

MAX_ROUND_S = 60.0
LEAST_ROUND_S = 0.05
"""A pace outside of this is nobody's wish."""


class Hello(Message, frozen=True):
    """What a node says of its swarm and of itself. `record` is its signed record, `round_s` the swarm's pace; `beat_s`,
    from a learner, how often it wants to hear from a sampler; `knock` the answer to one that calls back."""

    protocol: int
    role: Role
    swarm: Id
    learner_key: PublicKeyField
    record: Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES)]
    round_s: Seconds
    beat_s: Seconds = 0.0
    knock: Annotated[bytes, msgspec.Meta(max_length=512)] = b""


def hello_route(answer: Callable[[str | None, str | None], Hello | None]) -> web.RouteDef:
    """Answers GET /v1/hello; `answer(knock, caller)` gives the hello, None while the node looks for its swarm."""

    async def handle(request: web.Request) -> web.Response:
        hello = answer(request.query.get("knock"), request.query.get("caller"))
        if hello is None:
            return web.Response(status=503, text="this node has not found its swarm yet", headers={"Retry-After": "2"})
        return binary(encode(hello))

    return web.get(HELLO_PATH, handle)


async def say_hello(peer: Peer, query: str = "") -> tuple[Hello, SignedRecord]:
    """The hello of the node behind `peer` and its record, checked. Another protocol is a UserError that says which
    side to upgrade."""
    data = await peer.get(HELLO_PATH + query, cap_bytes=HELLO_BYTES, timeout_s=HELLO_S)
    hello = decode(data, Hello, cap_bytes=HELLO_BYTES)
    if hello.protocol != PROTOCOL or hello.swarm != swarm_id_of(hello.learner_key):
        raise ProtocolError("the answer does not say which swarm this is")
    if not LEAST_ROUND_S <= hello.round_s <= MAX_ROUND_S:
        raise ProtocolError(f"a swarm with rounds of {hello.round_s:g} s is none")
    signed = open_record(hello.record, SwarmId(hello.swarm))
    if signed.record.role != hello.role:
        raise ProtocolError("the answer contradicts its own record")
    return hello, signed
