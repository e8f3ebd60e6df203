"""A node's copy of the weights: one flat memory-mapped file in layout order, overwritten region by region.

The map knows what each region holds by its BLAKE3: hashed at the start, then taken from what it wrote. So of an apply
that was cut off it need only remember the target and the regions that were being overwritten:

    weights.bin      the weights
    weights.current  head and table of the last version that the map held as a whole
    weights.target   head and table of the version that an apply or a fill is writing
    weights.redo     decoded regions that are being overwritten, one a slot

An apply decodes a region beside the old bytes, checks the decoded digest, writes it to its redo slot and only then over
the map. After a SIGKILL at any byte a region is therefore the target's (done), the base's (to do), or whole in the redo
file. Any other content (a power cut, a failing disk) counts as damage and is fetched in full.

Where there is room, the map lies in memory instead (memory_map.py).

The map's owner keeps it consistent for readers: it never runs two applies or fills, or one and an engine's copy, at the
same time. `version` is None while regions of two versions may be mixed. Blocking; call from threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor
from functools import partial
from pathlib import Path

from swarm.broadcast.store.disk import allocate, map_file, replace_file, write_at
from swarm.broadcast.store.store import HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.version.codec import Buffer, decode_region, encode_region
from swarm.broadcast.version.manifest import (
    TABLE_BYTES,
    WHOLE,
    ByteSpan,
    ChunkTable,
    Codec,
    FullRegion,
    Head,
    Layout,
    encoded_spans,
    open_head,
    open_table,
    region_dtypes,
    regions_of,
)
from swarm.errors import ProtocolError
from swarm.types import VersionId
from swarm.wire import Message, decode, digest, encode

REGIONS_IN_HAND = 8  # Regions decoded at a time: 64 MiB at most with their encodings, whatever the size of the model
REDO_HEADER_BYTES = 8  # In the redo file a region follows its index, little-endian
RECORD_BYTES = TABLE_BYTES + 4096
UNKNOWN = b""  # Stands for the digest of a region whose content is of no use


class MapRecord(Message, frozen=True):
    """The version that the map holds or will hold, as a file beside it."""

    sealed_head: bytes
    table_bytes: bytes


class WeightMap:
    """The copy under `directory` of the weights that the owner of `learner_key` signs."""

    def __init__(self, directory: Path, layout: Layout, learner_key: bytes) -> None:
        """Reopen the files that are there: hash every region, and finish those that were being overwritten."""
        directory.mkdir(parents=True, exist_ok=True)
        self.log_from: VersionId | None = None
        """The oldest version whose encodings the map still needs, beside those that are kept anyway; None: of none."""
        self.layout = layout
        self.regions = regions_of(layout)
        self.dtypes = region_dtypes(layout)
        self.path = self._place(directory)
        self._next = directory / "weights.next"
        self._redo = directory / "weights.redo"
        self._current_path = directory / "weights.current"
        self._target_path = directory / "weights.target"
        self._learner_key = learner_key
        self._slot_bytes = REDO_HEADER_BYTES + max(span.nbytes for span in self.regions)
        self._holds: list[bytes] = []
        self._open_map()
        self._current = self._read_record(self._current_path)
        self._target = self._read_record(self._target_path)
        self._finish_overwriting()
        self.version: VersionId | None = None
        self._settle()

    @property
    def unfinished(self) -> VersionId | None:
        """The version that an apply or a fill was writing when it was cut off."""
        return self._target.head.version if self._target else None

    @property
    def current(self) -> SignedVersion | None:
        """The version that the map holds, or None while it is being changed."""
        return self._current if self.version is not None else None

    @property
    def last_whole(self) -> VersionId | None:
        """The last version that the map held as a whole. Most regions may still belong to it."""
        return self._current.head.version if self._current else None

    def lacking(self, table: ChunkTable) -> list[int]:
        """Return the regions that differ from a version's."""
        return [i for i, entry in enumerate(table.regions) if self._holds[i] != entry.decoded_digest]

    def missing_base(self, version: SignedVersion) -> list[int]:
        """Return the regions that `apply` cannot make: deltas whose base is not there."""
        return [i for i in self.lacking(version.table) if not self._can_decode(version, i)]

    def can_become(self, version: SignedVersion) -> bool:
        """Return True if `apply` will take this version: it is newer than the map's, and every base is there."""
        if self._current is not None and version.head.version < self._current.head.version:
            return False
        return version.head.version != self.version and not self.missing_base(version)

    def apply(self, held: HeldVersion, pool: Executor | None = None) -> None:
        """Turn the map into `held`, which must be complete. `pool` decodes regions in parallel.

        Raise ProtocolError before anything is touched if the version is older than the map's, or if a region is a delta
        whose base the map does not hold; and midway if a region does not decode to what was signed.
        """
        if held.head.version == self.version:
            return
        if missing := self.missing_base(held):
            raise ProtocolError(
                f"version {held.head.version} is a delta against {held.head.base}, and {len(missing)} regions of the "
                f"map, which holds {self.version}, are not of it"
            )
        lacking = self.lacking(held.table)
        self.begin_fill(held)
        self._apply_regions(held, lacking, pool)
        self.finish()

    def _apply_regions(self, held: HeldVersion, lacking: list[int], pool: Executor | None) -> None:
        spans = encoded_spans(held.table)
        redo = os.open(self._redo, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            allocate(redo, self._slot_bytes * REGIONS_IN_HAND, self._redo)
            for at in range(0, len(lacking), REGIONS_IN_HAND):
                # A slot is free again once all regions of its window have been written over the map.
                window = enumerate(lacking[at : at + REGIONS_IN_HAND])
                run_all(pool, [partial(self._apply_region, held, i, spans[i], redo, slot) for slot, i in window])
        finally:
            os.close(redo)

    def begin_fill(self, target: SignedVersion) -> None:
        """Let the map become `target` from now on, region by region, and give up a former target."""
        if self._current is not None and target.head.version < self._current.head.version:
            raise ProtocolError(
                f"version {target.head.version} is older than {self._current.head.version}, which this node has held"
            )
        self.version = None
        record = MapRecord(sealed_head=target.sealed_head, table_bytes=target.table_bytes)
        replace_file(self._target_path, encode(record))
        self._target = target

    def put_region(self, index: int, codec: Codec, encoded: bytes | memoryview) -> bool:
        """Take one region of the fill's target, in full. Return False, and write nothing, if it is not what was signed.

        Several threads may put different regions. If one is cut off, it is fetched again.
        """
        assert self._target is not None
        wanted = self._target.table.regions[index].decoded_digest
        if self._holds[index] == wanted:
            return True
        try:
            content = decode_region(codec, encoded, self.regions[index].nbytes, self.dtypes[index])
        except ProtocolError:
            return False
        if codec not in WHOLE or digest(content) != wanted:
            return False
        self._overwrite(index, content, wanted)
        return True

    def finish(self) -> None:
        """Make the fill's target the map's version. All of its regions must be there."""
        assert self._target is not None
        assert not self.lacking(self._target.table)
        self._settle()

    def exchange(self, staging: Path, fresh: HeldVersion) -> None:
        """Exchange the map for the file at `staging`, which holds the weights of `fresh`. The old map becomes the
        staging file.

        This takes three renames: nothing is copied, and the next staging finds its blocks already there.
        """
        self.begin_fill(fresh)
        os.replace(staging, self._next)
        os.replace(self.path, staging)
        os.replace(self._next, self.path)
        self._view = map_file(self.path, self.layout.total_bytes)
        self._holds = [entry.decoded_digest for entry in fresh.table.regions]
        self._reopen_descriptor()
        self.finish()

    def recheck(self) -> int:
        """Hash the map again. Return how many regions are not what was written (a failing disk, another process)."""
        before = self._holds
        self._holds = [digest(self.content(i)) for i in range(len(self.regions))]
        self._settle()
        return sum(now != then for now, then in zip(self._holds, before, strict=True))

    def content(self, index: int) -> memoryview:
        """Return a read-only view of a region of the map."""
        span = self.regions[index]
        return self._view[span.start : span.start + span.nbytes]

    def encode_full(self, index: int, wanted: bytes) -> FullRegion | None:
        """Encode region `index` for a node that lacks it, if its digest is now `wanted`; otherwise return None.

        The digest is compared on a copy, because an apply may be writing over the map meanwhile (I2).
        """
        if self._holds[index] != wanted:
            return None
        content = bytes(self.content(index))
        if digest(content) != wanted:
            return None
        codec, encoded = encode_region(content, self.dtypes[index])
        assert codec == "raw" or codec == "full"
        return FullRegion(codec=codec, encoded=encoded)

    def close(self) -> None:
        """Close the files. The map must not be used any more."""
        os.close(self._descriptor)
        self._view = memoryview(b"")

    # -- one region ------------------------------------------------------------------------------------------

    def _can_decode(self, version: SignedVersion, index: int) -> bool:
        """Return whether a region that the map lacks can be made of a version's encoding."""
        if (codec := version.table.regions[index].codec) in WHOLE:
            return True
        base = self._current
        return (
            base is not None
            and codec != "frozen"
            and base.head.version == version.head.base
            and self._holds[index] == base.table.regions[index].decoded_digest
        )

    def _apply_region(self, held: HeldVersion, index: int, encoded: ByteSpan, redo: int, slot: int) -> None:
        beside = self._decoded(held, index, encoded)
        at = slot * self._slot_bytes
        write_at(redo, index.to_bytes(REDO_HEADER_BYTES, "little"), at, self._redo)
        write_at(redo, beside, at + REDO_HEADER_BYTES, self._redo)
        # The redo file now holds all of it: only now may the base be lost.
        self._overwrite(index, beside, held.table.regions[index].decoded_digest)

    def _decoded(self, held: HeldVersion, index: int, encoded: ByteSpan) -> Buffer:
        """Return a region of a version, proven. Raise ProtocolError if it is not what the learner signed."""
        span, entry = self.regions[index], held.table.regions[index]
        base = self.content(index) if entry.codec not in WHOLE else None
        beside = decode_region(entry.codec, held.chunks.encoded(encoded), span.nbytes, self.dtypes[index], base)
        if digest(beside) != entry.decoded_digest:
            raise ProtocolError(f"the region at {span.start} does not decode to what the learner signed")
        return beside

    def _overwrite(self, index: int, content: Buffer, holds: bytes) -> None:
        self._holds[index] = UNKNOWN
        write_at(self._descriptor, content, self.regions[index].start, self.path)
        self._holds[index] = holds

    # -- files -----------------------------------------------------------------------------------------------

    def _place(self, directory: Path) -> Path:
        return directory / "weights.bin"

    def _open_map(self) -> None:
        if self._next.exists():
            # Cut off between two renames of `exchange`. The old map, if it still lies here, is of no more use.
            os.replace(self._next, self.path)
        known = self.path.exists() and self.path.stat().st_size == self.layout.total_bytes
        self._reopen_descriptor()
        allocate(self._descriptor, self.layout.total_bytes, self.path)
        self._view = map_file(self.path, self.layout.total_bytes)
        self._holds = [digest(self.content(i)) if known else UNKNOWN for i in range(len(self.regions))]

    def _reopen_descriptor(self) -> None:
        if (before := getattr(self, "_descriptor", None)) is not None:
            os.close(before)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)

    def _read_record(self, path: Path) -> SignedVersion | None:
        """Return a record that its learner signed. Remove anything else."""
        try:
            record = decode(path.read_bytes(), MapRecord, cap_bytes=RECORD_BYTES)
            head: Head = open_head(record.sealed_head, self._learner_key)
            table = open_table(record.table_bytes, head, self.layout)
        except FileNotFoundError:
            return None
        except ProtocolError:
            path.unlink()
            return None
        return SignedVersion(head=head, sealed_head=record.sealed_head, table=table, table_bytes=record.table_bytes)

    def _finish_overwriting(self) -> None:
        """Put back the regions of the redo file that belong to the target and are not in the map."""
        if self._target is None or not self._redo.exists():
            return
        with self._redo.open("rb") as redo:
            for slot in range(REGIONS_IN_HAND):
                redo.seek(slot * self._slot_bytes)
                index = int.from_bytes(redo.read(REDO_HEADER_BYTES), "little")
                if index >= len(self.regions):
                    continue
                content = redo.read(self.regions[index].nbytes)
                wanted = self._target.table.regions[index].decoded_digest
                if self._holds[index] != wanted and digest(content) == wanted:
                    self._overwrite(index, content, wanted)

    def _settle(self) -> None:
        """Find which version the map holds as a whole, and record it if it has just become whole."""
        if self._target is not None and not self.lacking(self._target.table):
            os.replace(self._target_path, self._current_path)
            self._current, self._target = self._target, None
        whole = self._current is not None and not self.lacking(self._current.table)
        self.version = self._current.head.version if self._current is not None and whole else None


def open_weights(store: VersionStore, pool: Executor | None = None) -> WeightMap:
    """Open the map beside the versions of a store, and apply what is there and can be applied."""
    assert store.layout is not None
    weights = WeightMap(store.directory, store.layout, store.learner_key)
    apply_stored(weights, store, pool)
    return weights


def apply_stored(weights: WeightMap, store: VersionStore, pool: Executor | None = None) -> None:
    """Apply what a store has and the map can become. Then drop what no longer has to be stored."""
    unfinished = weights.unfinished
    # The version that was begun comes first: its base is half overwritten.
    for held in sorted(store.versions(), key=lambda held: (held.head.version != unfinished, held.head.version)):
        if held.chunks.complete and weights.can_become(held):
            weights.apply(held, pool)
    store.keep_from = weights.log_from
    store.prune()


def run_all(pool: Executor | None, calls: list[Callable[[], None]]) -> None:
    """Run all calls to their end, even if some fail; then raise the first fault."""
    if pool is None:
        for call in calls:
            call()
        return
    futures = [pool.submit(call) for call in calls]
    for future in futures:
        try:
            future.exception()
        except CancelledError:
            pass  # the pool is being shut down; concurrent.futures.wait would wait for this one for ever
    for future in futures:
        future.result()
