"""The learner of the ingest benchmark: the network side of a learner node in one process on one core, without trainer.

What is real: NodeServer with its default limits, sessions, RolloutService, RolloutPlane, Journal and RewardPool (whose
process runs on the clients' core, where a learner would have it on another of its own). Batches are taken as soon as
they are whole and each makes a version, at once: training takes no time here.
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
from swarm.net.signing import SigningKey, swarm_id_of
from swarm.rollout.api import RolloutService
from swarm.rollout.journal.journal import Journal
from swarm.rollout.plane.effects import ScoreWanted
from swarm.rollout.plane.plane import PlaneRules, RolloutPlane
from swarm.rollout.scoring import Scorer
from swarm.tasks import load_task
from swarm.tasks.base import TaskOptions
from swarm.tasks.reward_pool import Completion, RewardPool
from swarm.types import SamplingRules, Score, Unscored, VersionId

VOCAB = 32_768
"""Of a common tokenizer."""

TOKENS = 512
"""Of every completion."""

REWARD_S = 5.0
"""Time limit of a reward, as `lead` sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """How the learner runs. `core` is the one it is pinned to; its reward process goes to `reward_core`."""

    directory: Path
    core: int
    reward_core: int
    group_size: int
    groups_per_step: int
    max_staleness: int
    profile: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the learner listens, and who it is."""

    port: int
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Running totals at one moment of the learner's monotonic clock. CPU seconds are of all its threads."""

    at_s: float
    cpu_s: float
    rss_mb: float
    peak_rss_mb: float
    journal_bytes: int
    steps: int
    verdicts: dict[str, int]


class BenchmarkedLearner:
    """The parts of a learner node that answer samplers, and the loop that takes batches."""

    def __init__(self, plan: LearnerPlan) -> None:
        self._plan = plan
        self._key = SigningKey.generate()
        sessions = ServerSessions(self._key, b"")
        self._service = RolloutService(
            key=self._key,
            sessions=sessions,
            emit=lambda kind, **fields: None,
        )
        routes = [session_route(sessions), *self._service.routes()]
        self._server = NodeServer(routes, self._service.status, counted=(sessions.refused,))
        self._steps = 0

    async def serve(self, pipe: Connection) -> None:
        """Serve until the pipe says stop (None); any other word is answered with a Mark."""
        # The reward process inherits its core.
        os.sched_setaffinity(0, {self._plan.reward_core})
        task = TaskOptions(name="copy")
        rewards = RewardPool(
            task=task,
            reward="task",
            tokenizer=write_tokenizer(self._plan.directory / "tokenizer.json"),
            stop_token_ids=(),
            timeout_s=REWARD_S,
        )
        await rewards.score([Completion(prompt=load_task(task).prompt(0), token_ids=b"\3\0\0\0", seed=0)])
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {self._plan.core})
        journal = Journal(self._plan.directory / "journal", group_size=self._plan.group_size)
        await journal.start()
        self._service.open(self._plane(), scorer(rewards), journal)
        await self._service.published(VersionId(incarnation=0, version=0))
        pipe.send(Address(port=await self._server.start("127.0.0.1", 0), key=self._key.public_bytes))
        works = [asyncio.create_task(work()) for work in (self._train, self._service.watch_silence)]
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

    def _plane(self) -> RolloutPlane:
        task = load_task(TaskOptions(name="copy"))
        rules = PlaneRules(
            swarm=swarm_id_of(self._key.public_bytes),
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
        return Mark(
            at_s=time.monotonic(),
            cpu_s=time.process_time(),
            rss_mb=rss_mb(),
            peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            journal_bytes=sum(path.stat().st_size for path in journal.rglob("*") if path.is_file()),
            steps=self._steps,
            verdicts=dict(verdicts),
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
    work = BenchmarkedLearner(plan).serve(pipe)
    if plan.profile is None:
        uvloop.run(work)
        return
    import cProfile

    profile = cProfile.Profile()
    profile.runcall(uvloop.run, work)
    profile.dump_stats(plan.profile)
