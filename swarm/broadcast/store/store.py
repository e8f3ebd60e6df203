"""The last few versions on disk, of the learner and of receivers alike. Blocking; call from threads.

A directory holds `layout`, and for each version `V.table`, `V.chunks` and `V.head`. The head is written last and
removed first: a version without a head does not exist, and the next start removes its other files.

`V.chunks` is a ChunkFile: one version's encodings, end to end, mapped into memory. It keeps I2: only `put` writes to
it, after comparing a chunk's BLAKE3 with the signed table, and `chunk` gives out no other chunks. The same digests find
the chunks that an earlier process received.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from swarm.broadcast.store.disk import DiskFull, allocate, replace_file, rest
from swarm.broadcast.version.manifest import (
    HEAD_BYTES,
    LAYOUT_BYTES,
    TABLE_BYTES,
    ByteSpan,
    ChunkTable,
    Head,
    Layout,
    chunk_spans,
    open_head,
    open_table,
    read_layout,
)
from swarm.errors import ProtocolError, TooLarge
from swarm.types import VersionId
from swarm.wire import Digest, digest


class ChunkFile:
    """The chunks of one version. Safe from several threads: two that put the same chunk write the same bytes."""

    def __init__(self, path: Path, table: ChunkTable, *, whole: bool = False) -> None:
        """Open or create the file. Raise DiskFull if there is no room for it. Blocking: this reads and hashes what the
        file holds, unless the caller has just written all of it (`whole`)."""
        self.path = path
        self.spans: list[ByteSpan] = []
        self.segments: list[range] = []
        """The chunks of each segment."""
        self.missing = 0
        self._starts: list[int] = []
        self._digests: tuple[bytes, ...] = ()
        self._have = bytearray()
        self._counting = threading.Lock()
        self.grow(table, whole=whole)

    def grow(self, table: ChunkTable, *, whole: bool = False) -> None:
        """Make room for the chunks of `table`, which describes those of before and further segments. Blocking."""
        known, segments = len(self.spans), chunk_spans(table)
        ends = list(accumulate(map(len, segments), initial=0))
        held = self.path.stat().st_size if self.path.exists() else 0
        view = _mapped(self.path, table.encoded_bytes)
        with self._counting:
            self.spans = [span for spans in segments for span in spans]
            self.segments = [range(start, end) for start, end in pairwise(ends)]
            self._starts = [span.start for span in self.spans]
            self._digests, self._view, self._is_whole = table.chunk_digests, view, table.is_whole
            self._have += bytes(-(-len(self.spans) // 8) - len(self._have))
            self.missing += len(self.spans) - known
        for index in range(known, len(self.spans)):
            span = self.spans[index]
            if whole or (span.end <= held and digest(self._at(span)) == self._digests[index]):
                self._record(index)

    @property
    def complete(self) -> bool:
        return self.missing == 0 and self._is_whole

    def has(self, index: int) -> bool:
        return bool(self._have[index >> 3] >> (index & 7) & 1)

    def have(self, chunks: range) -> bytes:
        """Return a bitmap: bit i % 8 of byte i // 8 is set if the i-th of `chunks` is held."""
        bits = int.from_bytes(self._have, "little") >> chunks.start & (1 << len(chunks)) - 1
        return bits.to_bytes(-(-len(chunks) // 8), "little")

    def has_all(self, chunks: range) -> bool:
        return all(self.has(index) for index in chunks)

    def put(self, index: int, data: bytes | memoryview) -> bool:
        """Keep `data` and return True if it is chunk `index`. Otherwise write nothing and return False."""
        if len(data) != self.spans[index].nbytes or digest(data) != self._digests[index]:
            return False
        if not self.has(index):
            with self._at(self.spans[index]) as place:
                place[:] = data
            self._record(index)
        return True

    def chunk(self, index: int) -> memoryview:
        """Return a read-only view of a chunk that is held."""
        assert self.has(index)
        return self._at(self.spans[index]).toreadonly()

    def encoded(self, span: ByteSpan) -> memoryview:
        """Return a read-only view of any span of the encoded stream. Every chunk that it touches must be held."""
        assert self.complete or self.has_all(self.touched(span))
        return self._at(span).toreadonly()

    def touched(self, span: ByteSpan) -> range:
        """Return the chunks that hold part of a span."""
        end = max(span.start, span.end - 1)
        return (
            range(bisect_right(self._starts, span.start) - 1, bisect_right(self._starts, end))
            if self.spans
            else range(0)
        )

    def recheck(self) -> int:
        """Forget chunks that are no longer what was signed (a failing disk, a second receiver). Return their number."""
        bad = [i for i, span in enumerate(self.spans) if self.has(i) and digest(self._at(span)) != self._digests[i]]
        for index in bad:
            self._forget(index)
        return len(bad)

    def rest(self) -> None:
        """Let go of the memory of what was read and written."""
        rest(self._view)

    def close(self) -> None:
        """Let go of the file. The mapping ends with the last view of a chunk, since one may be half sent."""
        self._view = memoryview(b"")

    def _at(self, span: ByteSpan) -> memoryview:
        return self._view[span.at]

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
        # The system refuses to map an empty file, and a signed table may state 0 bytes.
        return memoryview(mmap.mmap(descriptor, nbytes)) if nbytes else memoryview(bytearray())
    finally:
        os.close(descriptor)


KEEP_VERSIONS = 4  # Versions that always stay on disk: a node that missed three publications goes on by deltas
IN_USE_S = 30.0
MAX_VERSIONS = 16
"""A version that was asked for in the last IN_USE_S stays too, up to this many in all: otherwise a slow node would
never finish fetching any."""

MAP_FILES = "weights.*"  # The weight map lies beside the versions and has the same layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedVersion:
    """A version's head and table, and the exact bytes that prove them."""

    head: Head
    sealed_head: bytes
    table: ChunkTable
    table_bytes: bytes

    @classmethod
    def read(cls, sealed_head: bytes, table_bytes: bytes, learner_key: bytes, layout: Layout) -> SignedVersion:
        """Return what these bytes describe. Raise ProtocolError unless the owner of `learner_key` signed it."""
        head = open_head(sealed_head, learner_key)
        table = open_table(table_bytes, head, layout)
        return SignedVersion(head=head, sealed_head=sealed_head, table=table, table_bytes=table_bytes)

    @property
    def version(self) -> VersionId:
        return self.head.version

    @property
    def base(self) -> VersionId | None:
        return self.head.base


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion(SignedVersion):
    """A version whose chunks are here or on their way."""

    chunks: ChunkFile


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunVersion:
    """The first segments of a version that the learner is still encoding. No head is signed yet, so that it may never
    come to be, or come to be another."""

    version: VersionId
    base: VersionId | None
    table: ChunkTable
    chunks: ChunkFile


Held = HeldVersion | BegunVersion


class VersionStore:
    """The versions under `directory` that the owner of `learner_key` signed."""

    def __init__(self, directory: Path, learner_key: bytes) -> None:
        """Load what a former process left. Drop what is damaged or belongs to another swarm."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.learner_key = learner_key
        self.layout: Layout | None = None
        self.layout_bytes = b""
        self.layout_digest = b""
        self._held: dict[VersionId, HeldVersion] = {}
        self._asked_at: dict[VersionId, float] = {}
        self._changing = threading.RLock()
        self.keep_from: VersionId | None = None
        """The oldest version that a map in memory is made again of (replay.py). None until that is known."""
        self._load()

    def set_layout(self, layout_bytes: bytes, layout: Layout) -> None:
        """Set the layout of every version to come. A new one removes the old versions and the map."""
        if digest(layout_bytes) == self.layout_digest:
            return
        with self._changing:
            for held in self.versions():
                self.drop(held.head.version)
            for path in self.directory.glob(MAP_FILES):
                path.unlink()
            replace_file(self.directory / "layout", layout_bytes)
            self._know_layout(layout_bytes, layout)

    def begin(self, version: SignedVersion, chunks: ChunkFile | None = None) -> HeldVersion:
        """Make room for a version and return it. If it is here already, return that one. `chunks` is its file, if that
        was begun with its first segments."""
        held = self._add(version, chunks=chunks)
        self.find(version.head.version)
        self.prune()
        return held

    def add_whole(self, version: SignedVersion) -> HeldVersion:
        """Add a version whose chunks the caller has just written to `chunks_path`, all of them."""
        held = self._add(version, whole=True)
        self.prune()
        return held

    def chunks_path(self, version: VersionId) -> Path:
        return self.directory / f"{version}.chunks"

    def find(self, version: VersionId, *, keeps: bool = True) -> HeldVersion | None:
        """Return the version if it is here, complete or not. Asking keeps it, if it `keeps`."""
        if keeps and version in self._held:
            self._asked_at[version] = time.monotonic()
        return self._held.get(version)

    def versions(self) -> list[HeldVersion]:
        """Return all versions that are here, oldest first."""
        held = dict(self._held)
        return [held[version] for version in sorted(held)]

    def newest(self) -> HeldVersion | None:
        return next(reversed(self.versions()), None)

    def object(self, wanted: Digest) -> bytes | None:
        """Return the layout or a chunk table by its digest."""
        if wanted == self.layout_digest:
            return self.layout_bytes
        return next((held.table_bytes for held in self.versions() if held.head.table_digest == wanted), None)

    def drop(self, version: VersionId) -> None:
        """Remove a version. A reader that has it can go on to the end: its mapping outlives its file."""
        with self._changing:
            self._held.pop(version, None)
            self._asked_at.pop(version, None)
            self._remove_files(str(version))

    def prune(self) -> None:
        """Drop all but the newest KEEP_VERSIONS, those in use, and those from `keep_from` on."""
        now = time.monotonic()
        with self._changing:
            # A copy: other threads call `find` without the lock, so that none of them waits for a disk.
            self._asked_at = {version: at for version, at in dict(self._asked_at).items() if now - at < IN_USE_S}
            for version in sorted(self._held)[:-KEEP_VERSIONS]:
                is_used = version in self._asked_at and len(self._held) <= MAX_VERSIONS
                if not is_used and (self.keep_from is None or version < self.keep_from):
                    self.drop(version)

    # -- files -----------------------------------------------------------------------------------------------

    def _add(self, version: SignedVersion, *, whole: bool = False, chunks: ChunkFile | None = None) -> HeldVersion:
        head, name = version.head, str(version.head.version)
        assert head.layout_digest == self.layout_digest, "set_layout comes first"
        with self._changing:
            known = self._held.get(head.version)
            if known is not None and known.head == head:
                return known
            if known is not None:
                raise ProtocolError(f"the learner signed two different versions {name}")
            try:
                if chunks is not None:
                    chunks.grow(version.table)
                held = self._hold(version, chunks or self._chunks(version, whole=whole))
                replace_file(self.directory / f"{name}.table", version.table_bytes)
                # Last: a version without a head does not exist.
                replace_file(self.directory / f"{name}.head", version.sealed_head)
            except DiskFull:
                self._remove_files(name)
                raise
            self._held[head.version] = held
            return held

    def _hold(self, version: SignedVersion, chunks: ChunkFile) -> HeldVersion:
        return HeldVersion(
            head=version.head,
            sealed_head=version.sealed_head,
            table=version.table,
            table_bytes=version.table_bytes,
            chunks=chunks,
        )

    def _chunks(self, version: SignedVersion, *, whole: bool = False) -> ChunkFile:
        return ChunkFile(self.chunks_path(version.head.version), version.table, whole=whole)

    def _load(self) -> None:
        path = self.directory / "layout"
        try:
            content = _read_capped(path, LAYOUT_BYTES)
            self._know_layout(content, read_layout(content))
        except (FileNotFoundError, ProtocolError):
            path.unlink(missing_ok=True)
        for path in sorted(self.directory.glob("*.head")):
            try:
                self._load_version(path)
            except (FileNotFoundError, ProtocolError):
                self._remove_files(path.stem)
        kept = {str(version) for version in self._held}
        for pattern in ("*.head", "*.table", "*.chunks", "*.partial"):
            for path in self.directory.glob(pattern):
                if path.suffix == ".partial" or path.stem not in kept:
                    path.unlink()
        self._asked_at.clear()

    def _load_version(self, path: Path) -> None:
        if self.layout is None:
            raise ProtocolError("without its layout a version is of no use")
        sealed_head, table_bytes = _read_capped(path, HEAD_BYTES), _read_capped(path.with_suffix(".table"), TABLE_BYTES)
        version = SignedVersion.read(sealed_head, table_bytes, self.learner_key, self.layout)
        if version.head.layout_digest != self.layout_digest or path.stem != str(version.version):
            raise ProtocolError("this version is of another model")
        self._held[version.version] = self._hold(version, self._chunks(version))

    def _know_layout(self, layout_bytes: bytes, layout: Layout) -> None:
        self.layout, self.layout_bytes, self.layout_digest = layout, layout_bytes, digest(layout_bytes)

    def _remove_files(self, name: str) -> None:
        for ending in ("head", "table", "chunks", "chunks.partial"):
            (self.directory / f"{name}.{ending}").unlink(missing_ok=True)


def newest_head(directory: Path, learner_key: bytes) -> bytes:
    """Return the sealed head of the newest version under `directory`, complete or not, or b"" if there is none."""
    found: dict[VersionId, bytes] = {}
    for path in directory.glob("*.head"):
        try:
            sealed = _read_capped(path, HEAD_BYTES)
            found[open_head(sealed, learner_key).version] = sealed
        except (FileNotFoundError, ProtocolError):
            continue  # damaged, or of another swarm: the store sweeps it away
    return found[max(found)] if found else b""


def _read_capped(path: Path, cap_bytes: int) -> bytes:
    if path.stat().st_size > cap_bytes:
        raise TooLarge(f"{path.name} is over the cap of {cap_bytes} bytes")
    return path.read_bytes()
