"""The engine's process as the sampler's benchmark calls it, without a node around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random

import psutil

from benchmarks.sampler_models import Versions
from swarm.process import Child
from swarm.sampler.engine import (
    EngineDtype,
    EngineKind,
    EngineOptions,
    Generate,
    Generated,
    Install,
    Installed,
    Job,
    NotInstalled,
    Start,
    Started,
)
from swarm.types import SamplingRules

HANG_S = 300.0
"""The first batch of an engine that compiles took half of this on two busy cores."""

TIME_LIMIT_S = 600.0
"""For one sample: more than any of them takes."""


class EngineBroken(Exception):
    """The engine does not do what is measured of it."""


class EngineProcess:
    """`module KIND`, which is to answer as engine_child does, with its log and files under `directory`."""

    def __init__(self, kind: EngineKind, directory: Path, module: str = "swarm.sampler.engine_child") -> None:
        self.log = directory / "engine.log"
        self._child = Child("engine", module, kind, log=self.log, hang_s=HANG_S)

    async def start(self, versions: Versions, *, places: int, dtype: EngineDtype = "auto") -> Started:
        """Build the model on the CPU; `places` samples at once."""
        context = versions.model.config.max_position_embeddings
        command = Start(
            directory=str(versions.files_dir),
            layout=versions.layout,
            options=EngineOptions(device="cpu", dtype=dtype, max_model_len=context, places=places, hang_s=HANG_S),
        )
        return await self.launch(command)

    async def launch(self, command: Start) -> Started:
        await self._child.start()
        return await self._child.call(command, Started)

    async def install(self, command: Install) -> Installed:
        """EngineBroken if the engine cannot prove that it holds the version."""
        match await self._child.call(command, Installed | NotInstalled):
            case Installed() as installed:
                return installed
            case NotInstalled(why=why):
                raise EngineBroken(f"version {command.version} was not installed: {why}")
        raise AssertionError

    async def draw(self, command: Generate) -> Generated:
        return await self._child.call(command, Generated)

    def rss_bytes(self) -> int:
        """Resident memory of the process and of all that it started."""
        assert self._child.pid is not None
        process = psutil.Process(self._child.pid)
        return int(sum(one.memory_info().rss for one in (process, *process.children(recursive=True))))

    def cpu_s(self) -> float:
        return cpu_seconds(self._child.pid)

    async def stop(self) -> None:
        await self._child.stop()


@asynccontextmanager
async def running(
    kind: EngineKind, directory: Path, module: str = "swarm.sampler.engine_child"
) -> AsyncIterator[EngineProcess]:
    """An engine's process that does not outlive its use."""
    engine = EngineProcess(kind, directory, module)
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def kept_busy(engine: EngineProcess, started: Started, versions: Versions) -> AsyncIterator[None]:
    """All places of an engine that takes on samples one by one draw meanwhile; one in lockstep installs between two
    batches in any case, and stays idle."""
    over = asyncio.Event()
    vocab_size, tokens = versions.model.config.vocab_size, versions.model.config.max_position_embeddings // 2

    async def one_place(seeds: Iterator[int]) -> None:
        while not over.is_set():
            await engine.draw(Generate(jobs=(random_job(next(seeds), vocab_size, prompt_tokens=8, tokens=tokens),)))

    seeds = count()
    async with asyncio.TaskGroup() as group:
        for _ in range(0 if started.lockstep else started.places):
            group.create_task(one_place(seeds))
        try:
            yield
        finally:
            # Calls are awaited to their ends: one that is cancelled kills the engine.
            over.set()


def cpu_seconds(pid: int | None) -> float:
    """CPU time of a process and of all that it started and that still runs."""
    assert pid is not None
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def random_job(seed: int, vocab_size: int, *, prompt_tokens: int, tokens: int) -> Job:
    """A sample of a random prompt that ends by its length alone."""
    random = Random(seed)
    return Job(
        prompt_token_ids=tuple(random.randrange(vocab_size) for _ in range(prompt_tokens)),
        seed=seed,
        rules=SamplingRules(temperature=1.0, max_new_tokens=tokens, stop_token_ids=()),
        time_limit_s=TIME_LIMIT_S,
    )
