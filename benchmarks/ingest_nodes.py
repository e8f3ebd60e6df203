"""The processes of the ingest benchmark: the network side of a learner on one core, and samplers without engines.

What is real of the learner: NodeServer with TLS and its default limits, sessions, RolloutService, RolloutPlane, Journal
and RewardPool (whose process runs on the clients' core, where a learner would have it on another of its own). Batches
are taken as soon as they are whole and each makes a version, at once. Samplers are real clients with completions that
were made in advance.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from msgspec import structs
from tokenizers import Tokenizer, models

from swarm.net.client import Busy, PeerClient, session_route
from swarm.net.server import NodeServer
from swarm.net.sessions import ServerSessions
from swarm.net.signing import SigningKey, node_id_of
from swarm.node.identity import load_or_create_tls
from swarm.rollout.api import RolloutService
from swarm.rollout.journal.journal import Journal
from swarm.rollout.messages import Answer, SampleName
from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.rollout.scoring import Scorer
from swarm.sampler.client import RolloutClient, samples_of
from swarm.tasks import load_task
from swarm.tasks.base import TaskOptions
from swarm.tasks.reward_pool import BeginRewards, Completion, RewardPool
from swarm.types import Address, Lease, Rollout, SamplingRules, Score, Span, Unscored, VersionId

# -- the learner -------------------------------------------------------------------------------------------------

VOCAB = 32_768  # Of a common tokenizer
TOKENS = 512  # Of every completion
REWARD_S = 5.0  # Time limit of a reward, as `lead` sets it


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. The learner is pinned to the first of `cores`; its reward process and `nodes` samplers, which
    submit as fast as they get verdicts, go to the other."""

    cores: tuple[int, int]
    nodes: int = 16
    group_size: int = 8
    groups_per_step: int = 64
    max_staleness: int = 8
    warm_s: float = 5.0
    measure_s: float = 10.0
    repeats: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where the learner listens, who it is, and the fingerprint of its certificate."""

    port: int
    key: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Running totals at one moment of the learner's monotonic clock. CPU seconds are of all its threads."""

    at_s: float
    cpu_s: float
    rss_mb: float
    journal_bytes: int
    steps: int
    verdicts: dict[str, int]


class BenchmarkedLearner:
    """The parts of a learner node that answer samplers, and the loop that takes batches."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan, self._directory = plan, directory
        self._key = SigningKey.generate()
        tls = load_or_create_tls(directory)
        self._fingerprint = tls.fingerprint
        sessions = ServerSessions(self._key, self._fingerprint)
        self._journal = Journal(directory / "journal", group_size=plan.group_size)
        self._service = RolloutService(sessions=sessions, journal=self._journal, emit=lambda kind, **fields: None)
        routes = [session_route(sessions), *self._service.routes()]
        self._server = NodeServer(routes, self._service.status, tls=tls.context, counted=(sessions.refused,))
        self._steps = 0

    async def serve(self, pipe: Connection) -> None:
        """Serve until the pipe says stop (None); any other word is answered with a Mark."""
        # The reward process inherits its core.
        os.sched_setaffinity(0, {self._plan.cores[1]})
        task = TaskOptions(name="copy")
        tokenizer = write_tokenizer(self._directory / "tokenizer.json")
        rewards = RewardPool(BeginRewards(task=task, tokenizer=str(tokenizer)), timeout_s=REWARD_S)
        await rewards.score([Completion(prompt=load_task(task).prompt(0), token_ids=b"\3\0\0\0", seed=0)])
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {self._plan.cores[0]})
        await self._journal.start()
        self._service.open(self._plane(), scorer(rewards))
        await self._service.published(VersionId(incarnation=0, version=0))
        port = await self._server.start("127.0.0.1", 0)
        pipe.send(Listening(port=port, key=self._key.public_bytes, fingerprint=self._fingerprint))
        works = [asyncio.create_task(work()) for work in (self._train, self._service.watch_silence)]
        while await asyncio.to_thread(pipe.recv) is not None:
            for work in works:
                if work.done():
                    work.result()
            pipe.send(self._mark())
        for work in works:
            work.cancel()
        await self._server.stop()
        await self._journal.close()
        await rewards.close()

    async def _train(self) -> None:
        while True:
            await self._service.next_batch()
            self._steps += 1
            await self._service.published(VersionId(incarnation=0, version=self._steps))

    def _plane(self) -> RolloutPlane:
        task = load_task(TaskOptions(name="copy"))
        rules = PlaneRules(
            run_seed=0,
            max_staleness=self._plan.max_staleness,
            groups_per_step=self._plan.groups_per_step,
            group_size=self._plan.group_size,
            rules=SamplingRules(temperature=1.0, max_new_tokens=TOKENS, stop_token_ids=(2,)),
            vocab_size=VOCAB,
            beat_s=5.0,
            lease_time_limit_s=600.0,
        )
        return RolloutPlane(
            rules, prompts=lambda number: structs.replace(task.prompt(number), token_ids=(1, 3, 4, 5, 6))
        )

    def _mark(self) -> Mark:
        journal = self._directory / "journal"
        return Mark(
            at_s=time.monotonic(),
            cpu_s=time.process_time(),
            rss_mb=rss_mb(),
            journal_bytes=sum(path.stat().st_size for path in journal.rglob("*") if path.is_file()),
            steps=self._steps,
            verdicts=dict(self._service.tally.verdicts),
        )


def scorer(rewards: RewardPool) -> Scorer:
    async def score(wanted: Sequence[ScoreWanted]) -> list[Score | Unscored]:
        return await rewards.score(
            [Completion(prompt=one.prompt, token_ids=one.rollout.token_ids, seed=0) for one in wanted]
        )

    return score


def write_tokenizer(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0")).save(str(path))
    return path


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run_learner(plan: Plan, directory: Path, pipe: Connection) -> None:
    uvloop.run(BenchmarkedLearner(plan, directory).serve(pipe))


# -- the samplers ------------------------------------------------------------------------------------------------

COMPLETIONS = 64  # Made in advance; each is used again and again, which no part of the learner notices
BEAT_S = 0.5  # A step takes longer, so that no sampler falls behind the bound
ASK_WAIT_S = 5.0
GROUPS_AHEAD = 4  # Leased at once, as by a sampler that asks one batch ahead of its engine


@dataclass(slots=True, kw_only=True)
class Observed:
    """What the samplers of one process saw: start (monotonic) and seconds of each submission that got verdicts, and
    outcomes, by verdict (rollouts) or by the reason why there was none (submissions)."""

    submissions: list[tuple[float, float]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


class Sampler:
    """One node. Its completions are random tokens with random log-probs, which hardly compress."""

    def __init__(self, plan: Plan, learner: Listening, observed: Observed, seed: int) -> None:
        self._plan, self._observed = plan, observed
        key = SigningKey.generate()
        self._node = key.node_id
        address = Address(host="127.0.0.1", port=learner.port, fingerprint=learner.fingerprint)
        self._peer = PeerClient(address, key=key, server=node_id_of(learner.key))
        self._client = RolloutClient(self._peer, key.node_id)
        self._held = VersionId(incarnation=0, version=0)
        self._in_hand: set[SampleName] = set()
        self._draw = random.Random(seed)
        self._completions = cycle(completions(self._draw))
        self._leased: asyncio.Queue[Lease] = asyncio.Queue(maxsize=GROUPS_AHEAD)

    async def run(self) -> None:
        async with self._peer, asyncio.TaskGroup() as group:
            for work in (self._beat, self._ask, self._submit_all):
                group.create_task(work())

    async def _beat(self) -> None:
        while True:
            newest = (await self._client.beat(self._held, len(self._in_hand), 1.0)).newest
            self._held = newest or self._held
            await asyncio.sleep(BEAT_S)

    async def _ask(self) -> None:
        while True:
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

    async def _submit_all(self) -> None:
        while True:
            await self._submit(await self._leased.get())

    async def _submit(self, lease: Lease) -> None:
        """Until there are verdicts, as a sampler does; what a full learner makes it wait counts."""
        answers, began = self._answers(lease), time.monotonic()
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


async def observe(plan: Plan, learner: Listening, pipe: Connection) -> None:
    """Run until the pipe says anything, then send what was observed."""
    observed = Observed()
    works = [asyncio.create_task(Sampler(plan, learner, observed, seed).run()) for seed in range(plan.nodes)]
    told = asyncio.create_task(asyncio.to_thread(pipe.recv))
    await asyncio.wait([*works, told], return_when=asyncio.FIRST_COMPLETED)
    for work in works:
        if work.done():
            work.result()
        work.cancel()
    pipe.send(observed)


def run_clients(plan: Plan, learner: Listening, pipe: Connection) -> None:
    os.sched_setaffinity(0, {plan.cores[1]})
    uvloop.run(observe(plan, learner, pipe))
