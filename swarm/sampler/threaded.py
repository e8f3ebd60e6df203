"""Libraries that block, as engines: their calls run one after another in one thread; and the sums of what one holds."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from swarm.broadcast.version.codec import MIX, tensor_sum
from swarm.broadcast.version.manifest import Layout
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


def wrong_tensor(path: str, layout: Layout, sums: tuple[int, ...], progress: Callable[[], None]) -> str | None:
    """The first tensor of the file at `path` whose sum is not the one that was signed, None if all are right. Reads the
    whole file, so that an engine finds it in memory. Blocking."""
    with open(path, "rb") as file:
        held = file.seek(0, 2)
        if held != layout.total_bytes:
            return f"the file has {held} bytes instead of {layout.total_bytes}"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
            at = 0
            for tensor, expected in zip(layout.tensors, sums, strict=True):
                with whole[at : at + tensor.nbytes] as part:
                    if tensor_sum(part) != expected:
                        return f"tensor {tensor.name} in the file is not the learner's"
                at += tensor.nbytes
                progress()
    return None


def sum_of_counts(counts: Any) -> int:
    """`tensor_sum` of words of which `counts` (65,536 of numpy's uint64) says how often each occurs: whoever holds them
    on another device counts them there."""
    return int((counts * MIX).sum(dtype=counts.dtype))


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
