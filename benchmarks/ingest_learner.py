"""The learner of the ingest benchmark: the network side of a learner node in one process on one core, without trainer.

What is real: NodeServer with TLS and its default limits, sessions, RolloutService, RolloutPlane, Journal and RewardPool
(whose process runs on the clients' core, where a learner would have it on another of its own). Batches are taken as
soon as they are whole and each makes a version, at once: training takes no time here.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from msgspec import structs
from tokenizers import Tokenizer, models

from swarm.net.client import session_route
from swarm.net.server import NodeServer
from swarm.net.sessions import ServerSessions
from swarm.net.signing import SigningKey
from swarm.node.identity import load_or_create_tls
from swarm.rollout.api import RolloutService
from swarm.rollout.journal.entries import Entry
from swarm.rollout.journal.journal import Journal
from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.rollout.scoring import Scorer
from swarm.tasks import load_task
from swarm.tasks.base import TaskOptions
from swarm.tasks.reward_pool import Begin, Completion, RewardPool
from swarm.types import SamplingRules, Score, Unscored, VersionId

VOCAB = 32_768
"""Of a common tokenizer."""

TOKENS = 512
"""Of every completion."""

REWARD_S = 5.0
"""Time limit of a reward, as `lead` sets it."""

PROBE_S = 0.01
"""Between two looks at how late the loop is: 500 in a window, at under a thousandth of the core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """How the learner runs. `core` is the one it is pinned to; its reward process goes to `reward_core`."""

    directory: Path
    core: int
    reward_core: int
    group_size: int
    groups_per_step: int
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the learner listens, who it is, and the fingerprint of its certificate."""

    port: int
    key: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Running totals at one moment of the learner's monotonic clock. CPU seconds are of all its threads. Since
    the mark before, `late_s` says how late the loop came to each probe, and `written_s` how long the journal had each
    submission wait."""

    at_s: float
    cpu_s: float
    rss_mb: float
    peak_rss_mb: float
    journal_bytes: int
    steps: int
    verdicts: dict[str, int]
    late_s: tuple[float, ...] = ()
    written_s: tuple[float, ...] = ()


class TimedJournal(Journal):
    """Notes how long those who write to it wait for their commit."""

    def __init__(self, directory: Path, *, group_size: int) -> None:
        super().__init__(directory, group_size=group_size)
        self.took_s: list[float] = []

    async def write(self, entries: Sequence[Entry]) -> None:
        began = time.monotonic()
        await super().write(entries)
        self.took_s.append(time.monotonic() - began)

    def taken_s(self) -> tuple[float, ...]:
        """The waits since the last call."""
        taken, self.took_s = tuple(self.took_s), []
        return taken


class BenchmarkedLearner:
    """The parts of a learner node that answer samplers, and the loop that takes batches."""

    def __init__(self, plan: LearnerPlan) -> None:
        self._plan = plan
        self._key = SigningKey.generate()
        tls = load_or_create_tls(plan.directory)
        self._fingerprint = tls.fingerprint
        sessions = ServerSessions(self._key, self._fingerprint)
        self._service = RolloutService(
            sessions=sessions,
            emit=lambda kind, **fields: None,
        )
        routes = [session_route(sessions), *self._service.routes()]
        self._server = NodeServer(routes, self._service.status, tls=tls.context, counted=(sessions.refused,))
        self._steps = 0
        self._late_s: list[float] = []

    async def serve(self, pipe: Connection) -> None:
        """Serve until the pipe says stop (None); any other word is answered with a Mark."""
        # The reward process inherits its core.
        os.sched_setaffinity(0, {self._plan.reward_core})
        task = TaskOptions(name="copy")
        tokenizer = write_tokenizer(self._plan.directory / "tokenizer.json")
        rewards = RewardPool(Begin(task=task, tokenizer=str(tokenizer)), timeout_s=REWARD_S)
        await rewards.score([Completion(prompt=load_task(task).prompt(0), token_ids=b"\3\0\0\0", seed=0)])
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {self._plan.core})
        journal = self._journal = TimedJournal(self._plan.directory / "journal", group_size=self._plan.group_size)
        await journal.start()
        self._service.open(self._plane(), scorer(rewards), journal)
        await self._service.published(VersionId(incarnation=0, version=0))
        port = await self._server.start("127.0.0.1", 0)
        pipe.send(Address(port=port, key=self._key.public_bytes, fingerprint=self._fingerprint))
        works = [asyncio.create_task(work()) for work in (self._train, self._probe, self._service.watch_silence)]
        while await asyncio.to_thread(pipe.recv) is not None:
            for work in works:
                if work.done():
                    work.result()
            pipe.send(self._mark())
        for work in works:
            work.cancel()
        await self._server.stop()
        await journal.close()
        await rewards.close()

    async def _train(self) -> None:
        while True:
            await self._service.next_batch()
            self._steps += 1
            await self._service.published(VersionId(incarnation=0, version=self._steps))

    async def _probe(self) -> None:
        """Note how late the loop comes to what is due, as it would come to a request that has just arrived."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self._late_s.append(max(0.0, loop.time() - due))

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
        verdicts: Counter[str] = self._service.tally.verdicts
        journal = self._plan.directory / "journal"
        late_s, self._late_s = tuple(self._late_s), []
        return Mark(
            at_s=time.monotonic(),
            cpu_s=time.process_time(),
            rss_mb=rss_mb(),
            peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            journal_bytes=sum(path.stat().st_size for path in journal.rglob("*") if path.is_file()),
            steps=self._steps,
            verdicts=dict(verdicts),
            late_s=late_s,
            written_s=self._journal.taken_s(),
        )


def scorer(rewards: RewardPool) -> Scorer:
    """Rewards as a learner node has them computed."""

    async def score(wanted: Sequence[ScoreWanted]) -> list[Score | Unscored]:
        return await rewards.score(
            [Completion(prompt=one.prompt, token_ids=one.rollout.token_ids, seed=0) for one in wanted]
        )

    return score


def write_tokenizer(path: Path) -> Path:
    """One word a token, VOCAB of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0")).save(str(path))
    return path


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run_learner(plan: LearnerPlan, pipe: Connection) -> None:
    """The process."""
    uvloop.run(BenchmarkedLearner(plan).serve(pipe))
