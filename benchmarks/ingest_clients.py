"""The samplers of the ingest benchmark: real clients with pre-made completions in the place of an engine.

`steady` samplers submit one group after another. `paced` ones have a group ready at fixed times; a submission counts
from then on, so that one that has to wait for the one before it is not called fast. `flooding` ones send ten times what
they may: each group once, and then again and again, on eight connections, without heed of any Retry-After. They begin
at rest, and rest when they are told to: then they hand in once what they were leased, and ask for nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Literal

import uvloop

from benchmarks.ingest_learner import TOKENS, VOCAB
from benchmarks.ingest_learner import Address as LearnerAddress
from swarm.errors import EchoError
from swarm.net.client import Busy, PeerClient
from swarm.net.signing import SigningKey, node_id_of
from swarm.rollout.messages import STEP_REPLY_BYTES, Answer, SampleName, StepReply, Submission
from swarm.sampler.client import RolloutClient, samples_of
from swarm.types import Address, Lease, Rollout, Span, VersionId
from swarm.wire import compress, decode, encode

Kind = Literal["steady", "paced", "flooding"]

COMPLETIONS = 64
"""Made in advance; each is used again and again, which no part of the learner notices."""

BEAT_S = 0.5
"""A step takes longer, so that no sampler falls behind the bound."""

ASK_WAIT_S = 5.0

GROUPS_AHEAD = 4
"""Leased at once, as by a sampler that asks one batch ahead of its engine."""

FLOOD_FACTOR = 10
"""How many submissions of a flooding sampler come to one that it may make."""

FLOOD_CONNECTIONS = 8
"""What a node may open (net/server.py), and PeerClient does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """One process of `nodes` samplers. `groups_per_s` is what each paced sampler submits, and what a flooding one may;
    `nice` keeps floods from starving the measurement of others on the same core."""

    kind: Kind
    learner: LearnerAddress
    nodes: int
    group_size: int
    groups_per_s: float
    core: int
    nice: int


@dataclass(slots=True, kw_only=True)
class Observed:
    """What the samplers of one process saw: start (monotonic) and seconds of each submission that got verdicts, and
    outcomes, by verdict (rollouts) or by the reason why there was none (submissions)."""

    submissions: list[tuple[float, float]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


class Sampler:
    """One node. Its completions are random tokens with random log-probs, which hardly compress."""

    def __init__(self, plan: ClientPlan, observed: Observed, seed: int) -> None:
        self._plan = plan
        self._observed = observed
        key = SigningKey.generate()
        self._node = key.node_id
        learner = plan.learner
        address = Address(host="127.0.0.1", port=learner.port, fingerprint=learner.fingerprint)
        self._peer = PeerClient(address, key=key, server=node_id_of(learner.key))
        self._client = RolloutClient(self._peer, key.node_id)
        self._held = VersionId(incarnation=0, version=0)
        self._in_hand: set[SampleName] = set()
        self._draw = random.Random(seed)
        self._completions = cycle(completions(self._draw))
        self._leased: asyncio.Queue[Lease] = asyncio.Queue(maxsize=GROUPS_AHEAD)
        self._phase = self._draw.random()
        self._working = asyncio.Event()
        if plan.kind != "flooding":
            self._working.set()

    def rest(self) -> None:
        self._working.clear()

    def work(self) -> None:
        self._working.set()

    async def run(self) -> None:
        """For ever."""
        behave = {"steady": self._steady, "paced": self._paced, "flooding": self._flood}[self._plan.kind]
        async with self._peer, asyncio.TaskGroup() as group:
            for work in (self._beat, self._ask, behave):
                group.create_task(work())

    async def _beat(self) -> None:
        while True:
            newest = (await self._client.beat(self._held, len(self._in_hand), 1.0)).newest
            self._held = newest or self._held
            await asyncio.sleep(BEAT_S)

    async def _ask(self) -> None:
        while True:
            await self._working.wait()
            answer = await self._client.ask(
                self._held, GROUPS_AHEAD * self._plan.group_size, ASK_WAIT_S, holding=self._in_hand
            )
            if not isinstance(answer, list):
                self._observed.outcomes[f"refused: {answer[0]}"] += 1
                await asyncio.sleep(0.0 if answer[0] == "paced" else 0.05)
                continue
            for lease in answer:
                self._in_hand.update(samples_of([lease]))
                await self._leased.put(lease)

    async def _steady(self) -> None:
        while True:
            await self._submit(await self._leased.get(), time.monotonic())

    async def _paced(self) -> None:
        async for due in self._ticks(self._plan.groups_per_s):
            lease = await self._leased.get()
            await self._submit(lease, due)

    async def _flood(self) -> None:
        sent: deque[bytes] = deque(maxlen=FLOOD_FACTOR)
        while True:
            await self._working.wait()
            await self._flood_until_rest(sent)
            while not self._leased.empty():
                await self._post(self._fresh_body(await self._leased.get()))

    async def _flood_until_rest(self, sent: deque[bytes]) -> None:
        under_way: set[asyncio.Task[None]] = set()
        tick = 0
        async for _ in self._ticks(FLOOD_FACTOR * self._plan.groups_per_s):
            if not self._working.is_set():
                return
            tick += 1
            fresh = not sent or (tick % FLOOD_FACTOR == 0 and not self._leased.empty())
            if fresh:
                sent.append(self._fresh_body(await self._leased.get()))
            if len(under_way) >= FLOOD_CONNECTIONS:
                self._observed.outcomes["all connections busy"] += 1
                continue
            task = asyncio.create_task(self._post(sent[-1] if fresh else self._draw.choice(sent)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    def _fresh_body(self, lease: Lease) -> bytes:
        self._in_hand.difference_update(samples_of([lease]))
        return self._body(lease)

    async def _ticks(self, per_s: float) -> AsyncIterator[float]:
        """The times (monotonic) at which something is due, `per_s` a second; as soon as one has come."""
        due = time.monotonic() + self._phase / per_s
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            yield due
            due += 1.0 / per_s

    async def _submit(self, lease: Lease, began: float) -> None:
        """Until there are verdicts, as a sampler does; what a full learner makes it wait counts."""
        answers = self._answers(lease)
        while True:
            try:
                verdicts = await self._client.submit(answers)
                break
            except Busy as busy:
                self._observed.outcomes["busy"] += 1
                await asyncio.sleep(busy.retry_after_s)
        self._observed.submissions.append((began, time.monotonic() - began))
        self._observed.outcomes.update(verdict.verdict for verdict in verdicts)
        self._in_hand.difference_update(samples_of([lease]))

    async def _post(self, body: bytes) -> None:
        began = time.monotonic()
        try:
            data = await self._peer.post("/v1/steps", body, cap_bytes=STEP_REPLY_BYTES, timeout_s=30.0)
        except Busy:
            self._observed.outcomes["busy"] += 1
            return
        except EchoError as error:
            self._observed.outcomes[type(error).__name__] += 1
            return
        self._observed.submissions.append((began, time.monotonic() - began))
        self._observed.outcomes.update(v.verdict for v in decode(data, StepReply, cap_bytes=STEP_REPLY_BYTES).steps)

    def _body(self, lease: Lease) -> bytes:
        return compress(encode(Submission(node=self._node, answers=tuple(self._answers(lease)))))

    def _answers(self, lease: Lease) -> list[Answer]:
        span = Span(version=max(self._held, lease.min_version), start=0, end=TOKENS)
        made = []
        for spec in lease.samples:
            token_ids, logprobs = next(self._completions)
            drawn = Rollout(
                group_id=lease.group_id,
                index=spec.index,
                token_ids=token_ids,
                logprobs=logprobs,
                spans=(span,),
                finish="length",
            )
            made.append(Answer(drawn, spec.attempt))
        return made


def completions(draw: random.Random) -> list[tuple[bytes, bytes]]:
    """Token ids and log-probs. Natural text has tokens of very different frequency: here an exponential's."""
    return [
        (
            array("i", (3 + int(draw.expovariate(8.0) * VOCAB) % (VOCAB - 3) for _ in range(TOKENS))).tobytes(),
            array("f", (-draw.expovariate(1.0) for _ in range(TOKENS))).tobytes(),
        )
        for _ in range(COMPLETIONS)
    ]


async def observe(plan: ClientPlan, pipe: Connection) -> None:
    """Run until the pipe says "stop", then send what was observed. "rest" and "work" are for those that flood."""
    observed = Observed()
    samplers = [Sampler(plan, observed, seed) for seed in range(plan.nodes)]
    works = [asyncio.create_task(sampler.run()) for sampler in samplers]
    told = asyncio.create_task(obey(samplers, pipe))
    await asyncio.wait([*works, told], return_when=asyncio.FIRST_COMPLETED)
    for work in works:
        if work.done():
            work.result()
        work.cancel()
    pipe.send(observed)


async def obey(samplers: Sequence[Sampler], pipe: Connection) -> None:
    """Do what the pipe says until it says "stop"."""
    while (word := await asyncio.to_thread(pipe.recv)) != "stop":
        for sampler in samplers:
            sampler.work() if word == "work" else sampler.rest()


def run_clients(plan: ClientPlan, pipe: Connection) -> None:
    """The process."""
    os.sched_setaffinity(0, {plan.core})
    os.nice(plan.nice)
    uvloop.run(observe(plan, pipe))
