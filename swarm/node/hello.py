"""The first word between two nodes: which swarm this is, who its learner is, and who answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from aiohttp import web

from swarm.errors import ProtocolError
from swarm.gossip.records import RECORD_BYTES, SignedRecord, open_record
from swarm.http import Peer, binary, other_protocol
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
    """What a node says of its swarm and of itself. `record` is its signed record and `learner` the learner's, which
    states the swarm's pace; `beat_s`, from a learner, how often it wants to hear from a sampler; `knock` the answer to
    one that calls back."""

    protocol: int
    role: Role
    swarm: Id
    learner_key: PublicKeyField
    record: Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES)]
    learner: Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES)]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A hello whose signatures were checked."""

    hello: Hello
    signed: SignedRecord
    learner: SignedRecord


async def say_hello(peer: Peer) -> Heard:
    """The hello of the node behind `peer`. ProtocolError if it does not hold together."""
    data = await peer.get(HELLO_PATH, cap_bytes=HELLO_BYTES, timeout_s=HELLO_S)
    hello = decode(data, Hello, cap_bytes=HELLO_BYTES)
    if hello.protocol != PROTOCOL:
        raise other_protocol("the node that answers", hello.protocol)
    if hello.swarm != swarm_id_of(hello.learner_key):
        raise ProtocolError("the answer does not say which swarm this is")
    signed = open_record(hello.record, SwarmId(hello.swarm))
    learner = open_record(hello.learner, SwarmId(hello.swarm))
    if signed.record.role != hello.role or learner.record.role != "learner":
        raise ProtocolError("the answer contradicts its own records")
    if not LEAST_ROUND_S <= learner.record.round_s <= MAX_ROUND_S:
        raise ProtocolError(f"a swarm with rounds of {learner.record.round_s:g} s is none")
    return Heard(hello=hello, signed=signed, learner=learner)
