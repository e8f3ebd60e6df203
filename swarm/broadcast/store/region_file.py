"""A model's weights in one file, region by region, which knows by its BLAKE3 what each region holds. Blocking."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swarm.broadcast.store.changes import Places
from swarm.broadcast.store.disk import allocate, rest, write_at
from swarm.broadcast.version.codec import Buffer, Words
from swarm.broadcast.version.manifest import ByteSpan
from swarm.wire import digest

UNKNOWN = b""  # Stands for the digest of a region whose content is of no use


class RegionFile:
    """The file at `path`. `holds` are the digests of its regions; UNKNOWN while one is written."""

    def __init__(self, path: Path, regions: Sequence[ByteSpan], holds: Sequence[bytes] | None = None) -> None:
        """Open or create the file, and hash what it holds; or open one that is whole and of which that is known. Raise
        DiskFull if there is no room."""
        self.path = path
        self._regions = regions
        nbytes = regions[-1].end
        is_here = path.exists() and path.stat().st_size == nbytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if holds is None:
            allocate(self._descriptor, nbytes, path)
        self._view = memoryview(mmap.mmap(self._descriptor, nbytes))
        self.holds = list(holds or (self.hashed() if is_here else [UNKNOWN] * len(regions)))

    def hashed(self) -> list[bytes]:
        """Return the digests of what the regions hold now."""
        return [digest(self.content(index)) for index in range(len(self._regions))]

    def content(self, index: int) -> memoryview:
        """Return a read-only view of a region."""
        return self._view[self._regions[index].at].toreadonly()

    def put(self, index: int, content: Buffer, holds: bytes) -> None:
        """Write all of a region, which then has the digest `holds`."""
        self.holds[index] = UNKNOWN
        write_at(self._descriptor, content, self._regions[index].start, self.path)
        self.holds[index] = holds

    def change(self, index: int, places: Places, words: Words, holds: bytes) -> None:
        """Change the 16-bit words of a region at `places`, which then has the digest `holds`."""
        span = self._regions[index]
        self.holds[index] = UNKNOWN
        np.frombuffer(self._view[span.at], dtype="<u2", count=span.nbytes // 2)[places] = words
        self.holds[index] = holds

    def rest(self) -> None:
        """Let go of the memory of what was read."""
        rest(self._view)

    def sync(self) -> None:
        """Wait until the disk has what was put."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file. Its mapping ends with the last view of a region."""
        os.close(self._descriptor)
        self._view = memoryview(b"")
