"""Encoding a version's regions, by this process or by several of its children.

numpy holds the interpreter's lock for about half of an encoding's time, so that two threads encode no faster than one
(1.1 GB/s); two processes encode twice as much. So a model of some size is encoded by child processes. Neither weights
nor encodings travel through their sockets: they map the same files, and write what they encode to a spool, which has a
place for each job under way. `python -m swarm.broadcast.encoding` is such a child.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path

import msgspec

from swarm.bounded import Bounded
from swarm.broadcast.coding import IN_HAND, NICENESS, in_thread
from swarm.broadcast.store.disk import map_file, write_at
from swarm.broadcast.version.codec import difference, encode_region, sum_change, tensor_sum
from swarm.broadcast.version.manifest import ByteSpan, Dtype, RegionEntry
from swarm.errors import ChildFailed
from swarm.process import Child, ChildChannel
from swarm.wire import digest

JOB_BYTES = 4 * 1024 * 1024  # Regions encoded in one go: enough that calls and answers cost nothing
WORTH_CHILDREN_BYTES = 64 * 1024 * 1024  # A smaller model is encoded before a child could have started
HANG_S = 120.0  # A job takes milliseconds


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A region to encode, and the parts of tensors in it that are summed, as `region_tensors` gives them."""

    span: ByteSpan
    dtype: Dtype
    parts: tuple[tuple[int, ByteSpan], ...]


class Encode(msgspec.Struct, frozen=True):
    """Encode regions of the weights in the file `fresh`, of `total_bytes`; as deltas against those in `base`, if it is
    given. Neither file changes meanwhile. The encodings go into the file `spool`, end to end from `at` on."""

    fresh: str
    base: str | None
    total_bytes: int
    regions: tuple[Region, ...]
    spool: str
    at: int


class EncodedRegion(msgspec.Struct, frozen=True, array_like=True):
    """`sums` are what the region adds to the sums of tensors: to those of the base, if there is one."""

    entry: RegionEntry
    sums: tuple[tuple[int, int], ...]


class Encoded(msgspec.Struct, frozen=True):
    regions: tuple[EncodedRegion, ...]


def encode_job(job: Encode) -> Encoded:
    """Encode the regions of a job. Blocking."""
    fresh = _mapped(job.fresh, job.total_bytes)
    base = _mapped(job.base, job.total_bytes) if job.base is not None else None
    path, at, done = Path(job.spool), job.at, list[EncodedRegion]()
    spool = os.open(path, os.O_WRONLY)
    try:
        for region in job.regions:
            one, encoded = _encode(region, fresh, base)
            write_at(spool, encoded, at, path)
            at += len(encoded)
            done.append(one)
    finally:
        os.close(spool)
    return Encoded(regions=tuple(done))


def _encode(region: Region, fresh: memoryview, base: memoryview | None) -> tuple[EncodedRegion, bytes]:
    new, parts = fresh[region.span.at], [part for _, part in region.parts]
    if base is None:
        codec, encoded = encode_region(new, region.dtype)
        sums = [tensor_sum(new[part.at]) for part in parts]
    else:
        old = base[region.span.at]
        differs = difference(new, old)
        codec, encoded = encode_region(new, region.dtype, old, differs)
        sums = [sum_change(new[part.at], old[part.at], differs.within(part.start, part.nbytes)) for part in parts]
    entry = RegionEntry(codec=codec, encoded_bytes=len(encoded), decoded_digest=digest(new))
    by_tensor = tuple((tensor, one) for (tensor, _), one in zip(region.parts, sums, strict=True))
    return EncodedRegion(entry, by_tensor), encoded


_MAPPED: Bounded[int, memoryview] = Bounded(2)


def _mapped(path: str, nbytes: int) -> memoryview:
    """Return a view of a file. The staging file and the map change names with each version, and stay mapped."""
    inode = os.stat(path).st_ino
    if (held := _MAPPED.pop(inode, None)) is None or len(held) != nbytes:
        held = map_file(Path(path), nbytes)
    _MAPPED[inode] = held
    return held


def jobs(fresh: Path, base: Path | None, total_bytes: int, regions: list[Region], spool: Path) -> Iterator[Encode]:
    """Yield the jobs of a whole version, in order. A place in the spool is used again after IN_HAND jobs."""
    at = number = 0
    place_bytes = max([JOB_BYTES, *(region.span.nbytes for region in regions)])
    while at < len(regions):
        end, nbytes = at, 0
        while end < len(regions) and (end == at or nbytes + regions[end].span.nbytes <= JOB_BYTES):
            nbytes += regions[end].span.nbytes
            end += 1
        path = str(base) if base is not None else None
        yield Encode(
            fresh=str(fresh),
            base=path,
            total_bytes=total_bytes,
            regions=tuple(regions[at:end]),
            spool=str(spool),
            at=number % IN_HAND * place_bytes,
        )
        at, number = end, number + 1


Submit = Callable[[Encode], Future[Encoded]]


def by_threads(pool: Executor) -> Submit:
    """Return what begins jobs in the threads of `pool`."""
    return lambda job: pool.submit(encode_job, job)


class Encoders:
    """Up to `count` child processes, started when they are first needed; and `pool`, for small models and in place of a
    child that failed. They log under `directory`."""

    def __init__(self, count: int, pool: Executor, directory: Path) -> None:
        self._pool = pool
        self._directory = directory
        self._count = count
        self._children: list[Child] = []
        self._free: asyncio.Queue[Child | None] = asyncio.Queue()  # None stands for a child that failed
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, total_bytes: int) -> None:
        """Start the children if a model of so many bytes is worth them. Calling it again does nothing."""
        if self._loop is not None or total_bytes < WORTH_CHILDREN_BYTES or self._count < 2:
            return
        log = self._directory / "encoders.log"
        self._children = [Child("encoder", __name__, log=log, hang_s=HANG_S) for _ in range(self._count)]
        starts = await asyncio.gather(*(child.start() for child in self._children), return_exceptions=True)
        for child, fault in zip(self._children, starts, strict=True):
            if fault is not None and not isinstance(fault, ChildFailed):
                raise fault
            self._free.put_nowait(child if fault is None else None)
        self._loop = asyncio.get_running_loop()

    def submit(self, job: Encode) -> Future[Encoded]:
        """Begin a job, from any thread but the loop's."""
        if self._loop is None:
            return by_threads(self._pool)(job)
        return asyncio.run_coroutine_threadsafe(self._by_child(job), self._loop)

    async def stop(self) -> None:
        await asyncio.gather(*(child.stop() for child in self._children))

    async def _by_child(self, job: Encode) -> Encoded:
        child = await self._free.get()
        try:
            if child is not None:
                with suppress(ChildFailed):
                    return await child.call(job, Encoded)
                child = None
            return await in_thread(encode_job, job, pool=self._pool)
        finally:
            self._free.put_nowait(child)


def main() -> None:
    os.nice(NICENESS)
    ChildChannel().serve(Encode, encode_job)


if __name__ == "__main__":
    main()
