"""Publishing on the learner's disk: staged weights become encodings, a chunk table, a signed head. Blocking."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from swarm.broadcast.coding import in_order
from swarm.broadcast.encoding import Encode, EncodedRegion, Region, Submit, jobs
from swarm.broadcast.store.disk import allocate, disk_error, map_file, require_room
from swarm.broadcast.store.store import BegunVersion, ChunkFile, HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.store.weight_map import open_weights
from swarm.broadcast.version.codec import FULL_RATIO, tensor_sum
from swarm.broadcast.version.manifest import (
    ITEM_BYTES,
    TABLE_BYTES,
    ChunkTable,
    Head,
    Layout,
    RegionEntry,
    Segment,
    frozen_regions,
    needs_base,
    region_tensors,
    regions_of,
    segment_cuts,
    sign_head,
    sign_segment,
    tensor_spans,
)
from swarm.errors import ProtocolError, UserError
from swarm.net.signing import SigningKey, swarm_id_of
from swarm.types import VersionId
from swarm.wire import Digest, decode, digest, encode

Begun = Callable[[BegunVersion, bytes], None]
"""Takes what of a version is encoded so far, after each segment but the last, with that segment, sealed. Without it a
version is one segment."""


def content_of(table: ChunkTable) -> Digest:
    """Return one digest over all weights of a version, whatever their encoding."""
    return digest(b"".join(entry.decoded_digest for entry in table.regions))


def content_of_file(path: Path, layout: Layout) -> Digest:
    """Return the same digest of staged weights."""
    weights = map_file(path, layout.total_bytes)
    return digest(b"".join(digest(weights[region.at]) for region in regions_of(layout)))


def base_of_file(path: Path, layout: Layout) -> Digest:
    """Return the digest of the frozen tensors in a file of weights, as a layout's adapter names it."""
    weights, found = map_file(path, layout.total_bytes), blake3()
    for tensor, span in zip(layout.tensors, tensor_spans(layout), strict=True):
        if tensor.frozen:
            found.update(weights[span.at])
    return Digest(found.digest())


class PublishedVersions:
    """The learner's versions under `directory`, of one layout, and the raw weights of the newest as a weight map.

    It finds what a former process published with the same key, which can be sent on.
    """

    def __init__(self, directory: Path, key: SigningKey, layout: Layout) -> None:
        self._key = key
        self._layout = layout
        self._spans = tensor_spans(layout)
        # The words that are summed could be cut between two regions.
        self._bytewise = {i for i, tensor in enumerate(layout.tensors) if ITEM_BYTES[tensor.dtype] == 1}
        self._frozen = frozen_regions(layout)
        self.store = VersionStore(directory, key.public_bytes)
        self.store.set_layout(encode(layout), layout)
        for held in self.store.versions():
            if not held.chunks.complete:
                # It was announced, but a power cut took its encodings: nobody can have it any more.
                self.store.drop(held.head.version)
        self.weights = open_weights(self.store)
        summed = [[one for one in parts if one[0] not in self._bytewise] for parts in region_tensors(layout)]
        self._regions = [
            Region(span, dtype, tuple(parts))
            for span, dtype, parts in zip(self.weights.regions, self.weights.dtypes, summed, strict=True)
        ]

    @property
    def newest(self) -> HeldVersion | None:
        return self.store.newest()

    def publish(
        self,
        staging: Path,
        version: VersionId,
        chunk_bytes: int,
        submit: Submit,
        *,
        full: bool = False,
        begun: Begun | None = None,
    ) -> HeldVersion:
        """Encode the staged weights as `version` and keep them. `submit` begins jobs (encoding.py).

        Deltas refer to the version published before, unless `full`; what is frozen is not encoded again. The staging
        file must not change meanwhile. Afterwards it holds other bytes, and the next staging writes all of it, or what
        is not frozen. DiskFull leaves everything as it was.
        """
        held = self._encode(staging, version, chunk_bytes, submit, full, begun)
        self.weights.exchange(staging, held)
        return held

    def republish(self, version: VersionId, chunk_bytes: int, submit: Submit) -> HeldVersion:
        """Publish the newest version's weights again, as `version`."""
        held = self._encode(self.weights.path, version, chunk_bytes, submit, full=False)
        self.weights.apply(held)
        return held

    def _encode(
        self, fresh: Path, version: VersionId, chunk_bytes: int, submit: Submit, full: bool, begun: Begun | None = None
    ) -> HeldVersion:
        newest = self.newest
        assert newest is None or version > newest.head.version
        # If the map is damaged, there is nothing to refer to.
        known = newest if newest is not None and newest.head.version == self.weights.version else None
        base = known if not full else None
        require_room(self.store.directory, self._expected_bytes(base), f"version {version}")
        path = self.store.chunks_path(version)
        partial = path.with_name(path.name + ".partial")
        try:
            table = self._write(partial, fresh, version, chunk_bytes, submit, base, known, begun)
            os.replace(partial, path)
        except OSError as error:
            raise disk_error(error, path, self._layout.total_bytes) from error
        finally:
            partial.unlink(missing_ok=True)
        # Where something is frozen, receivers make a version again of all those before it.
        follows = known is not None and (needs_base(table) or any(self._frozen))
        return self._sign(version, known.head.version if known is not None and follows else None, table)

    def _write(
        self,
        path: Path,
        fresh: Path,
        version: VersionId,
        chunk_bytes: int,
        submit: Submit,
        base: HeldVersion | None,
        known: HeldVersion | None,
        begun: Begun | None,
    ) -> ChunkTable:
        """Write all encodings to `path`, end to end, and return their table. What is frozen is as in `known`."""
        regions = len(self._regions)
        # An adapter is a small part of the stream, at its end: most segments would hold nothing.
        in_segments = begun is not None and self._layout.adapter is None
        cuts = segment_cuts(self._layout.total_bytes, regions) if in_segments else (regions,)
        writing = Writing(chunk_bytes, cuts)
        sums = [0] * len(self._layout.tensors)
        if known is not None:
            pairs = zip(self._layout.tensors, known.table.tensor_sums, strict=True)
            sums = [total if base is not None or tensor.frozen else 0 for tensor, total in pairs]
        with path.open("wb") as file:
            for one, encoded in self._encodings(fresh, base, known, submit, path.with_suffix(".spool.partial")):
                for tensor, change in one.sums:
                    sums[tensor] = (sums[tensor] + change) % 2**64
                file.write(encoded)
                segment = writing.add(one.entry, encoded)
                if begun is not None and segment is not None and not writing.is_over:
                    file.flush()
                    begun(*self._begun(path, version, base, writing, segment))
        weights = map_file(fresh, self._layout.total_bytes)
        for tensor in self._bytewise:
            if known is not None and self._layout.tensors[tensor].frozen:
                continue
            sums[tensor] = tensor_sum(weights[self._spans[tensor].at])
        return msgspec.structs.replace(writing.table, tensor_sums=tuple(sums))

    def _begun(
        self, path: Path, version: VersionId, base: HeldVersion | None, writing: Writing, segment: ChunkTable
    ) -> tuple[BegunVersion, bytes]:
        """Sign the segment that is the last one in the file at `path`."""
        refers_to = base.head.version if base is not None else None
        signed = Segment(
            swarm=swarm_id_of(self._key.public_bytes),
            version=version,
            base=refers_to,
            layout_digest=self.store.layout_digest,
            number=len(writing.table.cuts) - 1,
            first=len(writing.table.regions) - len(segment.regions),
            table=segment,
        )
        chunks = ChunkFile(path, writing.table, whole=True)
        so_far = BegunVersion(version=version, base=refers_to, table=writing.table, chunks=chunks)
        return so_far, sign_segment(signed, self._key)

    def _encodings(
        self, fresh: Path, base: HeldVersion | None, known: HeldVersion | None, submit: Submit, spool: Path
    ) -> Iterator[tuple[EncodedRegion, memoryview]]:
        """Yield all regions and their encodings, in order. Frozen ones are as in `known`, and are not even read. An
        encoding is lost when the next one is taken."""
        before = known.table.regions if known is not None else ()
        skipped = self._frozen if known is not None else [False] * len(self._regions)
        to_encode = [region for region, skip in zip(self._regions, skipped, strict=True) if not skip]
        path = self.weights.path if base is not None else None
        encoded = _spooled(list(jobs(fresh, path, self._layout.total_bytes, to_encode, spool)), submit, spool)
        for index, skip in enumerate(skipped):
            if skip:
                entry = RegionEntry(codec="frozen", encoded_bytes=0, decoded_digest=before[index].decoded_digest)
                yield EncodedRegion(entry, ()), memoryview(b"")
            else:
                yield next(encoded)

    def _sign(self, version: VersionId, base: VersionId | None, table: ChunkTable) -> HeldVersion:
        table_bytes = encode(table)
        try:
            decode(table_bytes, ChunkTable, cap_bytes=TABLE_BYTES)
        except ProtocolError as error:
            raise UserError(f"this model is too large to be sent to samplers: {error}") from error
        head = Head(
            swarm=swarm_id_of(self._key.public_bytes),
            learner_key=self._key.public_bytes,
            version=version,
            base=base,
            layout_digest=self.store.layout_digest,
            layout_bytes=len(self.store.layout_bytes),
            table_digest=digest(table_bytes),
            table_bytes=len(table_bytes),
        )
        sealed_head = sign_head(head, self._key)
        return self.store.add_whole(
            SignedVersion(head=head, sealed_head=sealed_head, table=table, table_bytes=table_bytes)
        )

    def _expected_bytes(self, base: HeldVersion | None) -> int:
        """Assume that a delta is as large as the last one. Of a first delta nothing is known."""
        if base is not None:
            return base.table.encoded_bytes if base.head.base is not None else 0
        return int(FULL_RATIO * self._layout.total_bytes)


def _spooled(todo: Sequence[Encode], submit: Submit, spool: Path) -> Iterator[tuple[EncodedRegion, memoryview]]:
    """Yield what the jobs encode, from their places in a file that exists for as long as that takes."""
    if not todo:
        return
    nbytes = max(job.at + sum(region.span.nbytes for region in job.regions) for job in todo)
    work = in_order(submit, todo)
    try:
        with spool.open("wb") as file:
            allocate(file.fileno(), nbytes, spool)
        view = map_file(spool, nbytes)
        for done, job in zip(work, todo, strict=True):
            at = job.at
            for one in done.regions:
                yield one, view[at : at + one.entry.encoded_bytes]
                at += one.entry.encoded_bytes
    finally:
        work.close()  # First: a job that finds no spool would count as a child that failed
        spool.unlink(missing_ok=True)


class Writing:
    """The table of encodings that are written end to end, and cut into chunks within each segment."""

    def __init__(self, chunk_bytes: int, cuts: tuple[int, ...]) -> None:
        self.table = ChunkTable(regions=(), cuts=(), chunk_bytes=chunk_bytes, chunk_digests=(), tensor_sums=())
        """Of the segments that are whole."""
        self._left = deque(cuts)
        self._entries: list[RegionEntry] = []
        self._digests: list[bytes] = []
        self._open_chunk = bytearray()

    @property
    def is_over(self) -> bool:
        return not self._left

    def add(self, entry: RegionEntry, encoded: memoryview) -> ChunkTable | None:
        """Add the next region. Return the table of its segment if it is the last one there."""
        cut = self.table.chunk_bytes
        self._entries.append(entry)
        self._open_chunk += encoded
        is_last = len(self._entries) == self._left[0]
        end = len(self._open_chunk) if is_last else len(self._open_chunk) // cut * cut
        self._digests += [digest(self._open_chunk[at : min(at + cut, end)]) for at in range(0, end, cut)]
        del self._open_chunk[:end]
        return self._end_segment() if is_last else None

    def _end_segment(self) -> ChunkTable:
        segment = msgspec.structs.replace(
            self.table, regions=tuple(self._entries), cuts=(self._left.popleft(),), chunk_digests=tuple(self._digests)
        )
        self.table = self.table.with_segment(segment)
        self._entries, self._digests = [], []
        return segment
