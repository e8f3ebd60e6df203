"""One version's encodings, end to end, in a file that is mapped into memory: chunks are received straight into it.

Who keeps I2 here: a chunk counts as held only through `accept` and `put`, which compare its BLAKE3 with the signed
table, and `chunk` gives out no other. What a former process had received is found by the same digests.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

from swarm.broadcast.disk import allocate
from swarm.broadcast.manifest import ChunkTable, Span, chunk_spans
from swarm.wire import digest


class ChunkFile:
    """The chunks of one version. Safe from several threads, as long as only one fills a place at a time."""

    def __init__(self, path: Path, table: ChunkTable, *, whole: bool = False) -> None:
        """Open or make the file; DiskFull if there is no room for it. Blocking: what it holds is read and hashed,
        unless the caller has just written all of it (`whole`)."""
        self.path = path
        self.spans: list[Span] = chunk_spans(table)
        self.missing = len(self.spans)
        self._digests = table.chunk_digests
        self._nbytes = table.encoded_bytes
        self._have = bytearray(-(-len(self.spans) // 8))
        self._counting = threading.Lock()
        held = path.stat().st_size if path.exists() else 0
        self._view = _mapped(path, self._nbytes)
        for index, span in enumerate(self.spans):
            if whole:
                self._record(index)
            elif span.start + span.nbytes <= held:
                self.accept(index)

    @property
    def complete(self) -> bool:
        return self.missing == 0

    def has(self, index: int) -> bool:
        return bool(self._have[index >> 3] >> (index & 7) & 1)

    def have(self) -> bytes:
        """A bitmap: bit i % 8 of byte i // 8 is set if chunk i is held."""
        return bytes(self._have)

    def place(self, index: int) -> memoryview:
        """Where chunk `index` is to be received, while it is not held.

        One receiver at a time: a second one would overwrite what the first one has proven. Whoever has the chunk
        already in memory calls `put`.
        """
        assert not self.has(index)
        return self._at(self.spans[index])

    def accept(self, index: int) -> bool:
        """True, and held from now on, if what lies at the place of chunk `index` is what was signed.

        If not it is held no more: somebody may have put the right one there while a wrong one was being received.
        """
        with self._at(self.spans[index]) as received:
            if digest(received) != self._digests[index]:
                self._forget(index)
                return False
        self._record(index)
        return True

    def put(self, index: int, data: bytes | memoryview) -> bool:
        """True, and held from now on, if `data` is chunk `index`; nothing is written otherwise."""
        if len(data) != self.spans[index].nbytes or digest(data) != self._digests[index]:
            return False
        if not self.has(index):
            with self._at(self.spans[index]) as place:
                place[:] = data
            self._record(index)
        return True

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk that is held, read-only."""
        assert self.has(index)
        return self._at(self.spans[index]).toreadonly()

    def encoded(self, span: Span) -> memoryview:
        """Any span of the encoded stream, read-only. The version is complete."""
        assert self.complete
        return self._at(span).toreadonly()

    def recheck(self) -> int:
        """Forget chunks that are no longer what was signed (a disk that fails, a second receiver); how many."""
        bad = [i for i, span in enumerate(self.spans) if self.has(i) and digest(self._at(span)) != self._digests[i]]
        with self._counting:
            for index in bad:
                self._have[index >> 3] &= ~(1 << (index & 7))
            self.missing += len(bad)
        return len(bad)

    def close(self) -> None:
        """Let go of the file. The mapping ends with the last view of a chunk: one may be half sent."""
        self._view = memoryview(b"")

    def _at(self, span: Span) -> memoryview:
        return self._view[span.start : span.start + span.nbytes]

    def _forget(self, index: int) -> None:
        with self._counting:
            if self.has(index):
                self._have[index >> 3] &= ~(1 << (index & 7))
                self.missing += 1

    def _record(self, index: int) -> None:
        with self._counting:
            if not self.has(index):
                self._have[index >> 3] |= 1 << (index & 7)
                self.missing -= 1


def _mapped(path: Path, nbytes: int) -> memoryview:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        allocate(descriptor, nbytes, path)
        # A map of nothing is refused by the system, and a version may differ from its base in nothing.
        return memoryview(mmap.mmap(descriptor, nbytes)) if nbytes else memoryview(bytearray())
    finally:
        os.close(descriptor)
