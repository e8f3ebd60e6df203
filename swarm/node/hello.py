"""The first message between two nodes, which says what swarm this is and who answers; and the run's card in it.

The card says what the run is about. Its learner signs it, and every node passes it on in its hello.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from aiohttp import web

from swarm.errors import ProtocolError
from swarm.files import without_directories
from swarm.gossip.records import RECORD_BYTES, SignedRecord, open_record
from swarm.net.client import (
    HttpPeer,
    binary,
    other_protocol,
)
from swarm.net.signing import PublicKeyField, SigningKey, swarm_id_of, unseal
from swarm.settings import Evaluation, LeadConfig, Learn, ModelSection, TaskSection
from swarm.types import MAX_ABOUT, Count, Seconds, SwarmId, quoted
from swarm.wire import PROTOCOL, Message, decode, encode

HELLO_PATH = "/v1/hello"
HELLO_BYTES = 4096
HELLO_S = 10.0  # Time limit of a hello: even a learner that is loading a large model answers at once
MIN_ROUND_S, MAX_ROUND_S = 0.05, 60.0  # Rounds shorter or longer than this are almost certainly a mistake
CARD_CONTEXT = "card"  # Context of its signature, so that it cannot pass for anything else
CARD_BYTES = 1408  # Longest names in four bytes a character, the signature and the key
Name = Annotated[str, msgspec.Meta(max_length=64)]


class Card(Message, frozen=True):
    """The model, what it learns, the size of its weights (0 while the learner has not loaded them), how long a sample
    with its prompt may be (0: as long as the model can read), and what its owner says that it is for."""

    model: Name
    task: Name
    weights_bytes: Count = 0
    sample_tokens: Count = 0
    about: Annotated[str, msgspec.Meta(max_length=MAX_ABOUT)] = ""


def sign_card(card: Card, key: SigningKey) -> bytes:
    """Return a sealed card."""
    return key.seal(CARD_CONTEXT, encode(card))


def card_of(model: str, task: str, *, weights_bytes: int = 0, sample_tokens: int = 0, about: str = "") -> Card:
    """Return what is told of a run: of paths on this machine only the last part."""
    return Card(
        model=without_directories(model)[:64],
        task=without_directories(task)[:64],
        weights_bytes=weights_bytes,
        sample_tokens=sample_tokens,
        about=about[:MAX_ABOUT],
    )


def what_is_learned(config: LeadConfig) -> dict[str, Any]:
    """Return the settings of a run that say nothing of its machine; of paths only the last part."""
    own = {name for section in (ModelSection, TaskSection, Learn, Evaluation) for name in section.model_fields}
    named = {"model": without_directories(config.model), "task": without_directories(config.task)}
    rewards = {without_directories(name): weight for name, weight in config.rewards.items()}
    known = {name: value for name, value in config.model_dump(mode="json").items() if name in own}
    return known | named | {"rewards": rewards}


def open_card(sealed: bytes, learner_key: bytes) -> Card | None:
    """Return the card in `sealed`, or None unless the owner of `learner_key` signed it."""
    try:
        return decode(unseal(CARD_CONTEXT, sealed, learner_key, cap_bytes=CARD_BYTES), Card, cap_bytes=CARD_BYTES)
    except ProtocolError:
        return None


def purpose(card: Card) -> str:
    said = f"; its owner says: {quoted(card.about)}" if card.about else ""
    return f"this swarm trains {quoted(card.model)} on the task {quoted(card.task)}{said}"


def card_lines(card: Card, *, draws: bool, has_base: bool) -> Iterator[str]:
    """Yield what a volunteer is told before anything is fetched. `draws`: an engine will hold the weights too."""
    # The codec imports numpy, which a node that only says hello does not need.
    from swarm.broadcast.version.codec import FULL_RATIO

    yield purpose(card)
    if card.weights_bytes:
        total = card.weights_bytes
        first = "only what differs from --base" if has_base else f"about {size(FULL_RATIO * total)}"
        more = ", in addition to the engine's own" if draws else ""
        yield (
            f"to download: {first} at first, then what each version changes; wanted: {size(total)} of memory for the "
            f"weights{more}, and up to {size((1 + FULL_RATIO) * total)} of disk"
        )
    pause = "; to have this machine back for a while: echo-node pause" if draws else ""
    yield f"to stop: Ctrl-C; what cannot be finished is handed back{pause}"


def size(nbytes: float) -> str:
    """Return a size in words, rounded up: what is asked for suffices."""
    unit, name = (1e8, "GB") if nbytes >= 1e8 else (1e5, "MB")
    return f"{-(-nbytes // unit) / 10:.1f} {name}"


class Hello(Message, frozen=True):
    """What a node says about its swarm and itself. `record` is its own signed record, `learner` the learner's, which
    states the length of a gossip round. In `beat_s` a learner says how often it wants to hear from a sampler. `knock`
    answers a node that dials back. `card` says what the run is about. `now` is the clock of the node that
    answers, in Unix time; 0 is unknown."""

    protocol: int
    learner_key: PublicKeyField
    record: Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES)]
    learner: Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES)]
    beat_s: Seconds = 0.0
    knock: Annotated[bytes, msgspec.Meta(max_length=512)] = b""
    card: Annotated[bytes, msgspec.Meta(max_length=CARD_BYTES)] = b""
    now: float = 0.0

    @property
    def swarm(self) -> SwarmId:
        return swarm_id_of(self.learner_key)


def hello_route(answer: Callable[[str | None, str | None], Hello | None]) -> web.RouteDef:
    """Return the route of GET /v1/hello. `answer(knock, caller)` returns the hello, or None while there is no swarm."""

    async def handle(request: web.Request) -> web.Response:
        hello = answer(request.query.get("knock"), request.query.get("caller"))
        if hello is None:
            return web.Response(status=503, text="this node has not found its swarm yet", headers={"Retry-After": "2"})
        return binary(encode(hello))

    return web.get(HELLO_PATH, handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A hello with checked signatures: of the sender's own record (`signed`) and of the learner's."""

    hello: Hello
    signed: SignedRecord
    learner: SignedRecord


async def say_hello(peer: HttpPeer) -> Heard:
    """Return the hello of the node behind `peer`. Raise ProtocolError if it contradicts itself."""
    data = await peer.get(HELLO_PATH, cap_bytes=HELLO_BYTES, timeout_s=HELLO_S)
    hello = decode(data, Hello, cap_bytes=HELLO_BYTES)
    if hello.protocol != PROTOCOL:
        raise other_protocol("the node that answers", hello.protocol)
    signed, learner = open_record(hello.record, hello.swarm), open_record(hello.learner, hello.swarm)
    if learner.record.role != "learner":
        raise ProtocolError("the answer names another node as the learner")
    if not MIN_ROUND_S <= learner.record.round_s <= MAX_ROUND_S:
        raise ProtocolError(f"the answer states rounds of {learner.record.round_s:g} s, which no swarm has")
    return Heard(hello=hello, signed=signed, learner=learner)
