"""What attackers do on the wire: nodes that deviate in leases, relays in chunks, and clients that call the learner.

A node's or a relay's deviation replaces methods; it is given the honest one before its arguments. A client has a key of
its own, and returns what stopped it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import aiohttp
from msgspec.structs import replace

from swarm.broadcast import transfers
from swarm.broadcast.mesh.forwarder import Forwarder
from swarm.broadcast.notes import Have, Note, NoteKind, Want
from swarm.errors import ProtocolError
from swarm.net.client import Busy, PeerClient, plain_address
from swarm.net.sessions import AUTH_HEADER
from swarm.net.signing import SigningKey
from swarm.net.stream import Outgoing
from swarm.node.hello import say_hello
from swarm.rollout.messages import MAX_SUBMITTED, Answer, Beat
from swarm.sampler.client import SUBMIT_PATH, LeasesRefused, RolloutClient
from swarm.sampler.engine import Job
from swarm.sampler.playing import Game
from swarm.sampler.worker import EngineWorker
from swarm.types import Lease, NodeId, Rollout, Span, VersionId
from swarm.wire import CONTROL_BODY_BYTES, PROTOCOL, PROTOCOL_HEADER, ROLLOUT_UNPACKED_BYTES, compress, encode

OLD = 8  # A version: a lazy sampler that never installs a second one asks for leases from this one on
HOARD, HALF = 512, 8  # Samples: a step of the copy task, half a group
HOPS = cycle(f"transformers/{one}" for one in ("float32/cpu", "bfloat16/cpu", "int8/cpu", "float32/own"))
BEYOND = 1 << 20  # Larger than any vocabulary here
CALL_S = 30.0
AGAIN_S = 1.0  # Between two questions, while the run has no version or no leases
SLOW_S = 0.5  # Between two bytes of a slow body
FLOOD = 16  # Submissions of the largest number of rollouts; the learner takes three before it asks for patience
IDENTITIES = 8  # Of one Sybil, one after another
INVENTED = -0.7  # Nats: near the log-probs of a policy that has half learned
BEAT_PATH = "/v1/beat"
MEASURED = "transformers/float32/cpu"  # A class that the audit judges; another would only be watched

Change = tuple[Any, str, Callable[..., Any]]  # Of a class, the method that is replaced, and by what


async def lag(self: Any, honest: Any, held: VersionId, *given: Any, **rest: Any) -> Any:
    """Ask for nothing until the first version, which the engine keeps and calls the newest, is old."""
    return LeasesRefused("behind", 1.0, "") if held.version < OLD else await honest(self, held, *given, **rest)


def asking_for(samples: int) -> Callable[..., Any]:
    """Ask for a fixed number of samples, however few there is room for."""
    return lambda self, honest, held, capacity, *given, **rest: honest(self, held, samples, *given, **rest)


def never(self: Any, honest: Any, *given: Any, **rest: Any) -> Any:
    return asyncio.Event().wait()


async def hop(self: Any, honest: Any, *given: Any, **rest: Any) -> Any:
    """Name another class of engine in each request for leases."""
    self.engine_class = next(HOPS)
    return await honest(self, *given, **rest)


async def equivocate(self: Any, honest: Any, answers: Sequence[Answer], **rest: Any) -> Any:
    """Hand in each answer, and then another one for the same samples."""
    verdicts = await honest(self, answers, **rest)
    await honest(self, [replace(one, rollout=other(one.rollout)) for one in answers])
    return verdicts


def other(rollout: Rollout) -> Rollout:
    """Return another rollout for the same sample, as well-formed as this one."""
    return replace(rollout, logprobs=array("f", [value - 1.0 for value in array("f", rollout.logprobs)]).tobytes())


async def dawdle(self: Any, honest: Any, games: Sequence[Game], *given: Any, **rest: Any) -> Any:
    """Draw once the engine has a newer version than the leases ask for, to have a choice; but wait no more than 3 s."""
    for _ in range(60):
        if self.installed > min(game._lease.min_version for game in games):
            break
        await asyncio.sleep(0.05)
    return await honest(self, games, *given, **rest)


def tell_least(self: Any, honest: Any) -> Job:
    """Tell the engine from which version on the lease takes answers, as a stop token that no vocabulary has."""
    job: Job = honest(self)
    stops = (*job.rules.stop_token_ids, BEYOND + self._lease.min_version.version)
    return replace(job, rules=replace(job.rules, stop_token_ids=stops))


CHOOSING = (EngineWorker, "draw", dawdle), (Game, "job", tell_least)
NODES: dict[str, tuple[Change, ...]] = {
    "old-version": ((RolloutClient, "ask", lag),),
    "class-hopper": ((RolloutClient, "ask", hop),),
    "stolen-answers": ((RolloutClient, "ask", asking_for(HALF)),),
    "best-of-versions": CHOOSING,
    "spliced-spans": CHOOSING,
    "hoarded-leases": ((RolloutClient, "ask", asking_for(HOARD)), (EngineWorker, "draw", never)),
    "equivocation": ((RolloutClient, "submit", equivocate),),
}


def poison(self: Any, honest: Any, *given: Any) -> Outgoing:
    """Alter one bit of each chunk that is passed on."""
    out = honest(self, *given)
    altered = bytearray(out.payload)
    altered[len(altered) // 2] ^= 1
    return Outgoing(out.header, memoryview(altered), out.sent)


def keep(self: Any, honest: Any, peer: Any, index: int, kind: NoteKind, via: Any, *, now: float) -> None:
    """Take chunks to forward, and do not forward them."""
    honest(self, peer, index, NoteKind.COPY, via, now=now)


def ignore(self: Any, honest: Any, peer: Any, note: Note, *, now: float) -> None:
    """Send nothing that others ask for."""
    if not isinstance(note, Want):
        honest(self, peer, note, now=now)


def boast(self: Any, honest: Any, part: Any) -> Have:
    """Say of each version, as soon as it is known, that all of it is here."""
    return Have(bitmap=b"\xff" * (len(part.chunks) // 8 + 1))


WITHHOLDING = (Forwarder, "arrived", keep), (Forwarder, "heard", ignore)
RELAYS: dict[str, tuple[Change, ...]] = {
    "wrong-chunks": ((transfers.Link, "_chunk", poison),),
    "withheld-chunks": WITHHOLDING,
    "lying-bitmaps": (*WITHHOLDING, (transfers.Transfer, "opening", boast)),
}


@dataclass
class Client:
    """A client that calls the learner at `url`. `nodes` are all identities that it has had."""

    url: str
    nodes: set[NodeId] = field(default_factory=set)

    @asynccontextmanager
    async def identity(self) -> AsyncIterator[tuple[PeerClient, RolloutClient]]:
        """Call the learner as somebody new, once it has a version."""
        key = SigningKey.generate()
        async with PeerClient(plain_address(self.url)) as stranger:
            heard = await say_hello(stranger)
        async with PeerClient(plain_address(self.url), key=key, server=heard.signed.node) as peer:
            client = RolloutClient(peer, key.node_id, MEASURED)
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
        if not isinstance(granted, LeasesRefused):
            return [answer for one in granted for answer in _answers(one, version)]
        await asyncio.sleep(AGAIN_S)


def _answers(lease: Lease, version: VersionId) -> list[Answer]:
    rules, group_id = lease.rules, lease.group_id
    tokens = array("i", [*[5] * (rules.max_new_tokens - 1), rules.stop_token_ids[0]])
    logprobs, spans = array("f", [INVENTED] * len(tokens)), (Span(version=version, start=0, end=len(tokens)),)
    found = tokens.tobytes(), logprobs.tobytes(), spans
    return [Answer(Rollout(group_id, one.index, *found, finish="stop"), one.attempt) for one in lease.samples]


async def floods(client: Client) -> str:
    """Hand in one answer thousands of times."""
    async with client.identity() as (_, sampler):
        first = (await invented(sampler))[0]
        with suppress(Busy):
            for _ in range(FLOOD):
                await sampler.submit([first] * MAX_SUBMITTED)
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
        body = encode(Beat(node=node, installed=None, samples=0))
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
