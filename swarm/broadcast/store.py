"""Versions on disk: what the learner has published, and a sampler's memory-mapped copy. Blocking; call from threads."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from swarm.broadcast.codec import decode_region, encode_region, tensor_sum
from swarm.broadcast.manifest import (
    ChunkTable,
    Codec,
    Dtype,
    Head,
    Layout,
    RegionEntry,
    Span,
    chunk_spans,
    regions_of,
    sign_head,
)
from swarm.errors import ProtocolError
from swarm.signing import SigningKey, swarm_id_of
from swarm.types import VersionId
from swarm.wire import Digest, digest, encode

CHUNK_BYTES = 256 * 1024
"""Unit of transfer: 20 ms of a 100 Mbit/s link. The planner will choose it per version."""

KEEP_VERSIONS = 4
"""Published versions that stay on the learner's disk in any case."""

IN_USE_S = 30.0
MOST_VERSIONS = 16
"""A version that was asked for within half a minute stays too, up to so many: a slow sampler that began to fetch it
would otherwise never come to the end of any."""

T = TypeVar("T")

REGIONS_IN_HAND = 8
"""Regions coded at a time: 32 MiB of encodings at most, whatever the size of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One version as the learner serves it. `path` holds the encodings end to end."""

    head: Head
    sealed_head: bytes
    table: ChunkTable
    table_bytes: bytes
    chunks: tuple[Span, ...]
    path: Path


class PublishedVersions:
    """The last few versions under `directory`, and their layout."""

    def __init__(self, directory: Path, key: SigningKey, layout: Layout) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = key
        self._versions: dict[VersionId, Published] = {}
        self._asked_at: dict[VersionId, float] = {}
        self.layout = layout
        self.layout_bytes = encode(layout)
        self.layout_digest = digest(self.layout_bytes)

    def publish(self, staging: Path, version: VersionId, pool: Executor) -> Published:
        """Encode the staged weights as `version`, sign its head and keep it. `pool` codes regions in parallel."""
        path = self._directory / f"{version}.chunks"
        with mapped(staging, self.layout.total_bytes) as weights:
            regions = _write_encodings(path, weights, self.layout, pool)
            sums = tuple(pool.map(lambda s: tensor_sum(weights[s.start : s.start + s.nbytes]), _tensors(self.layout)))
        table = ChunkTable(
            regions=tuple(regions),
            chunk_bytes=CHUNK_BYTES,
            chunk_digests=_chunk_digests(path),
            tensor_sums=sums,
        )
        published = self._sign(version, table, path)
        self._versions[version] = published
        self._prune()
        return published

    def find(self, version: VersionId) -> Published | None:
        """The version, if it is still kept; asking keeps it."""
        if version in self._versions:
            self._asked_at[version] = time.monotonic()
        return self._versions.get(version)

    def object(self, wanted: Digest) -> bytes | None:
        """The layout or a chunk table by its digest."""
        if wanted == self.layout_digest:
            return self.layout_bytes
        return next((p.table_bytes for p in self._versions.values() if p.head.table_digest == wanted), None)

    def _sign(self, version: VersionId, table: ChunkTable, path: Path) -> Published:
        table_bytes = encode(table)
        head = Head(
            swarm=swarm_id_of(self._key.public_bytes),
            learner_key=self._key.public_bytes,
            version=version,
            base=None,
            layout_digest=self.layout_digest,
            layout_bytes=len(self.layout_bytes),
            table_digest=digest(table_bytes),
            table_bytes=len(table_bytes),
        )
        return Published(
            head=head,
            sealed_head=sign_head(head, self._key),
            table=table,
            table_bytes=table_bytes,
            chunks=tuple(chunk_spans(table)),
            path=path,
        )

    def _prune(self) -> None:
        now = time.monotonic()
        self._asked_at = {version: at for version, at in self._asked_at.items() if now - at < IN_USE_S}
        for version in sorted(self._versions)[:-KEEP_VERSIONS]:
            if version not in self._asked_at or len(self._versions) > MOST_VERSIONS:
                self._versions.pop(version).path.unlink()


def read_chunk(published: Published, index: int) -> bytes | None:
    """Chunk `index` of a version; None if there is no such chunk or the version was pruned meanwhile."""
    if not 0 <= index < len(published.chunks):
        return None
    try:
        with published.path.open("rb") as file:
            return os.pread(file.fileno(), published.chunks[index].nbytes, published.chunks[index].start)
    except FileNotFoundError:
        return None


class WeightMap:
    """A sampler's copy of the weights: one flat file in layout order, overwritten region by region.

    Who keeps it whole for its reader: the worker never lets an apply and an engine's copy run at the same time.
    `version` is None while regions of two versions may be mixed.
    """

    def __init__(self, directory: Path, layout: Layout) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.layout = layout
        self.path = directory / "weights.bin"
        self.version: VersionId | None = None
        self._incoming = directory / "incoming.chunks"
        self._chunks: list[Span] = []
        with self.path.open("wb") as file:
            file.truncate(layout.total_bytes)

    def start(self, table: ChunkTable) -> None:
        """Make room for the chunks of a version."""
        self._chunks = chunk_spans(table)
        with self._incoming.open("wb") as file:
            file.truncate(table.encoded_bytes)

    def store(self, table: ChunkTable, index: int, data: bytes) -> None:
        """Keep chunk `index` of the version that was started; ProtocolError unless it is the signed one (I2)."""
        span = self._chunks[index]
        if len(data) != span.nbytes or digest(data) != table.chunk_digests[index]:
            raise ProtocolError(f"chunk {index} is not the one that the chunk table names")
        with self._incoming.open("r+b") as file:
            os.pwrite(file.fileno(), data, span.start)

    def apply(self, head: Head, table: ChunkTable, pool: Executor) -> None:
        """Decode the stored chunks over the map. Every region is checked before it is written (I2)."""
        self.version = None
        with self._incoming.open("rb") as encoded, self.path.open("r+b") as weights:
            for jobs in _windows(_decode_jobs(table, self.layout)):
                list(pool.map(lambda job: _apply_region(job, encoded.fileno(), weights.fileno()), jobs))
        self._incoming.unlink()
        self.version = head.version


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeJob:
    entry: RegionEntry
    encoded: Span
    decoded: Span
    dtype: Dtype


@contextmanager
def mapped(path: Path, nbytes: int) -> Iterator[memoryview]:
    """A read-only view of the first `nbytes` bytes of a file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as view:
        whole = memoryview(view)
        try:
            yield whole
        finally:
            whole.release()


def _write_encodings(path: Path, weights: memoryview, layout: Layout, pool: Executor) -> list[RegionEntry]:
    entries: list[RegionEntry] = []
    dtypes = _region_dtypes(layout)
    with path.open("wb") as file:
        for jobs in _windows(list(zip(regions_of(layout), dtypes, strict=True))):
            for entry, encoded in pool.map(lambda job: _encode_one(weights, *job), jobs):
                file.write(encoded)
                entries.append(entry)
    return entries


def _encode_one(weights: memoryview, span: Span, dtype: Dtype) -> tuple[RegionEntry, bytes]:
    with weights[span.start : span.start + span.nbytes] as data:
        codec: Codec
        codec, encoded = encode_region(data, dtype)
        entry = RegionEntry(codec=codec, encoded_bytes=len(encoded), decoded_digest=digest(data))
    return entry, encoded


def _apply_region(job: _DecodeJob, encoded: int, weights: int) -> None:
    data = os.pread(encoded, job.encoded.nbytes, job.encoded.start)
    content = decode_region(job.entry.codec, data, job.decoded.nbytes, job.dtype)
    if digest(content) != job.entry.decoded_digest:
        raise ProtocolError(f"the region at {job.decoded.start} does not decode to what the learner signed")
    os.pwrite(weights, content, job.decoded.start)


def _decode_jobs(table: ChunkTable, layout: Layout) -> list[_DecodeJob]:
    jobs: list[_DecodeJob] = []
    at = 0
    for entry, span, dtype in zip(table.regions, regions_of(layout), _region_dtypes(layout), strict=True):
        jobs.append(
            _DecodeJob(entry=entry, encoded=Span(start=at, nbytes=entry.encoded_bytes), decoded=span, dtype=dtype)
        )
        at += entry.encoded_bytes
    return jobs


def _region_dtypes(layout: Layout) -> list[Dtype]:
    """The dtype of each region: regions never cross from one dtype to another."""
    tensors = deque(zip(_tensors(layout), layout.tensors, strict=True))
    dtypes: list[Dtype] = []
    for region in regions_of(layout):
        while tensors[0][0].start + tensors[0][0].nbytes <= region.start:
            tensors.popleft()
        dtypes.append(tensors[0][1].dtype)
    return dtypes


def _tensors(layout: Layout) -> list[Span]:
    spans: list[Span] = []
    at = 0
    for tensor in layout.tensors:
        spans.append(Span(start=at, nbytes=tensor.nbytes))
        at += tensor.nbytes
    return spans


def _chunk_digests(path: Path) -> tuple[bytes, ...]:
    with path.open("rb") as file:
        return tuple(digest(data) for data in iter(lambda: file.read(CHUNK_BYTES), b""))


def _windows(items: list[T]) -> Iterator[list[T]]:
    for at in range(0, len(items), REGIONS_IN_HAND):
        yield items[at : at + REGIONS_IN_HAND]
