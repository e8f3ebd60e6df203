"""Libraries that block, as engines: their calls run one after another in one thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from swarm.broadcast.manifest import Layout
from swarm.sampler.engine import (
    Generate,
    Generated,
    Install,
    Installed,
    NotInstalled,
    Probe,
    Probed,
    Start,
    Started,
    Told,
)
from swarm.sampler.sums import wrong_tensor

R = TypeVar("R")


class BlockingEngine(Protocol):
    """`Engine` without await. The file of an install was checked before it is asked."""

    def start(self, command: Start, progress: Told) -> Started: ...

    def install(self, command: Install, progress: Told) -> Installed | NotInstalled: ...

    def generate(self, command: Generate, progress: Told) -> Generated: ...

    def probe(self, command: Probe) -> Probed: ...


class Threaded:
    """The `Engine` that is a blocking one in a thread. A file is checked beside a running batch, not after it."""

    def __init__(self, engine: BlockingEngine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._layout: Layout | None = None

    async def start(self, command: Start, progress: Told) -> Started:
        self._layout = command.layout
        return await self._run(self._engine.start, command, progress)

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        assert self._layout is not None
        began = time.monotonic()
        wrong = await asyncio.to_thread(wrong_tensor, command.path, self._layout, command.tensor_sums, progress)
        if wrong is not None:
            return NotInstalled("file", wrong)
        check_s = time.monotonic() - began
        done = await self._run(self._engine.install, command, progress)
        if isinstance(done, NotInstalled):
            return done
        return msgspec.structs.replace(done, seconds=done.seconds + check_s, check_s=check_s)

    async def generate(self, command: Generate, progress: Told) -> Generated:
        return await self._run(self._engine.generate, command, progress)

    async def probe(self, command: Probe, progress: Told) -> Probed:
        return await self._run(self._engine.probe, command)

    async def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
