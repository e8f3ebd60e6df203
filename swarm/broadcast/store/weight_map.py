"""A node's copy of the weights: one flat memory-mapped file in layout order, changed region by region.

Each version changes every region a little. Written to a file, that is the whole model for each version: at one version
a minute an SSD is worn out in weeks. So the map lies in /dev/shm if there is room, where the engine's process maps it
too, and the disk has the encodings as they were received (store.py) and a copy of the map from now and then.
Otherwise the map lies on the disk, and there is no copy.

    weights.bin      on the disk: the copy, or the map itself
    weights.current  head and table of the last version that the map held as a whole
    weights.target   head and table of the version that an apply or a fill is writing

The map knows what each region holds by its BLAKE3: hashed at the start, then taken from what it wrote. So a killed
process leaves regions of the target (done), of the base (to do), and a few that were being written. These are made
again from the copy and from the encodings that are here (replay.py), and so are all regions after a power cut, when the
memory is lost. What cannot be made again is fetched. When the encodings are as many bytes as the map, the copy is
brought up to date: on average twice the received bytes are written.

Sparse regions are decoded and proven while others are still on their way (`decode_ahead`), as lists of words that
change; the map itself changes only when all of a version is here. The places of these words are remembered until the
engine has taken them (changes.py). Both take memory, so that a map on the disk does neither.

The map's owner keeps it consistent for readers: it never runs two applies or fills, or one and an engine's copy, at the
same time. `version` is None while regions of two versions may be mixed. Blocking; call from threads.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from swarm.broadcast.store.changes import NOTHING, Places, Trail, write_changes
from swarm.broadcast.store.disk import free_bytes, replace_file
from swarm.broadcast.store.place import claim
from swarm.broadcast.store.region_file import UNKNOWN, RegionFile
from swarm.broadcast.store.replay import MAX_LOG, Log
from swarm.broadcast.store.store import Held, HeldVersion, SignedVersion, VersionStore
from swarm.broadcast.version.codec import Buffer, Words, decode_changes, decode_region, encode_region
from swarm.broadcast.version.manifest import (
    TABLE_BYTES,
    WHOLE,
    ByteSpan,
    ChunkTable,
    Codec,
    FullRegion,
    Layout,
    encoded_spans,
    is_whole_model,
    region_dtypes,
    regions_of,
)
from swarm.errors import ProtocolError
from swarm.types import VersionId
from swarm.wire import Message, decode, digest, encode

TIGHT_SHARE = 8  # On a disk that is nearly full the encodings take at most this part of the map, not as much as the map
AHEAD_SHARE = 16  # What is decoded ahead, and what an engine has yet to take: at most a 16th of the map each
RECORD_BYTES = TABLE_BYTES + 4096
NOTHING_NEW: Words = np.empty(0, dtype="<u2")


class MapRecord(Message, frozen=True):
    """The version that the map holds or will hold, as a file beside it."""

    sealed_head: bytes
    table_bytes: bytes


class Ahead:
    """Regions of one version that were decoded before all of it was here: which words change, and to what. Proven."""

    def __init__(self, version: VersionId | None = None) -> None:
        self.version = version
        self.nbytes = 0
        self._regions: dict[int, tuple[bytes, Places, Words]] = {}

    def put(self, index: int, proven: bytes, places: Places, words: Words) -> None:
        """Keep what turns a region into one with the digest `proven`."""
        self._regions[index] = proven, places, words
        self.nbytes += places.nbytes + words.nbytes

    def take(self, version: VersionId, index: int, wanted: bytes) -> tuple[Places, Words] | None:
        """Return what turns a region into the wanted one. It may have been another while no head was signed yet."""
        proven, places, words = self._regions.pop(index, (b"", NOTHING, NOTHING_NEW))
        return (places, words) if (version, wanted) == (self.version, proven) else None


class WeightMap:
    """The copy under `directory` of the weights that the owner of `learner_key` signs; in the directory `memory` if
    that is given."""

    def __init__(self, directory: Path, layout: Layout, learner_key: bytes, memory: Path | None = None) -> None:
        """Reopen the files that are there, and hash every region."""
        directory.mkdir(parents=True, exist_ok=True)
        self.layout = layout
        self.regions = regions_of(layout)
        self.dtypes = region_dtypes(layout)
        self.path = (memory or directory) / "weights.bin"
        self._memory = memory
        self._current_path = directory / "weights.current"
        self._target_path = directory / "weights.target"
        self._learner_key = learner_key
        self._log_from: VersionId | None = None
        self._is_copied = False  # Whether the copy holds all of version `_log_from`
        self._spare_bytes = layout.total_bytes // AHEAD_SHARE if memory else 0
        self._trail = Trail(self._spare_bytes)
        self._changed: dict[int, Places | None] = {}
        self._ahead = Ahead()
        self._changing = threading.Lock()  # Held while regions are decoded ahead, or the map becomes another version
        self._lock: int | None = None
        self._copy: RegionFile | None = None
        self._map = self._open_map(directory)
        self._current = self._read_record(self._current_path)
        self._target = self._read_record(self._target_path)
        self.version: VersionId | None = None
        self._settle()

    @property
    def in_memory(self) -> bool:
        return self._memory is not None

    @property
    def log_from(self) -> VersionId | None:
        """The oldest version whose encodings the map still needs, beside those that are kept anyway; None: of none."""
        return self._log_from if self.in_memory else None

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
        return [i for i, entry in enumerate(table.regions) if self._map.holds[i] != entry.decoded_digest]

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
        if self._map.holds[index] == wanted:
            return True
        try:
            content = decode_region(codec, encoded, self.regions[index].nbytes, self.dtypes[index])
        except ProtocolError:
            return False
        if codec not in WHOLE or digest(content) != wanted:
            return False
        self._map.put(index, content, wanted)
        # It is in no encoding that is kept here.
        return self._copy_region(index)

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
        after = self._after_exchange
        os.replace(staging, after)
        os.replace(self.path, staging)
        os.replace(after, self.path)
        self._map.close()
        self._map = RegionFile(self.path, self.regions, [entry.decoded_digest for entry in fresh.table.regions])
        self.finish()

    def recheck(self) -> int:
        """Hash the map again. Return how many regions are not what was written (a failing disk, another process)."""
        before, self._map.holds = self._map.holds, self._map.hashed()
        self._settle()
        return sum(now != then for now, then in zip(self._map.holds, before, strict=True))

    def content(self, index: int) -> memoryview:
        """Return a read-only view of a region of the map."""
        return self._map.content(index)

    def encode_full(self, index: int, wanted: bytes) -> FullRegion | None:
        """Encode region `index` for a node that lacks it, if its digest is now `wanted`; otherwise return None.

        The digest is compared on a copy, because an apply may be writing over the map meanwhile (I2).
        """
        if self._map.holds[index] != wanted:
            return None
        content = bytes(self.content(index))
        if digest(content) != wanted:
            return None
        codec, encoded = encode_region(content, self.dtypes[index])
        assert codec == "raw" or codec == "full"
        return FullRegion(codec=codec, encoded=encoded)

    def close(self) -> None:
        """Close the files, and give the memory back. The map must not be used any more."""
        self._map.close()
        if self._copy is not None:
            self._copy.close()
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    # -- from version to version -----------------------------------------------------------------------------

    def decode_ahead(self, held: Held, indices: Sequence[int], pool: Executor) -> bool:
        """Decode regions whose encodings are here, of a version that is still on its way. Return False if the map does
        not hold its base."""
        with self._changing:
            if self.version is None or self.version != held.base:
                return False
            if self._ahead.version != held.version:
                self._ahead = Ahead(held.version)
            spans = encoded_spans(held.table)
            run_all(pool, [partial(self._decode_ahead, held, i, spans[i]) for i in indices])
            return True

    def changes_since(self, version: VersionId) -> Path | None:
        """Write down which words have changed since `version`, for an engine that holds it, and return the file. Return
        None if that is not known: then the engine needs all. Older changes are forgotten."""
        self._trail.forget(version)
        if (changed := self._trail.since(version)) is None:
            return None
        path = self.path.with_name("weights.changed")
        write_changes(path, len(self.regions), changed)
        return path

    def _apply_regions(self, held: HeldVersion, lacking: list[int], pool: Executor | None) -> None:
        before = self.last_whole
        if is_whole_model(held.table):
            # All of the map can be made from this version alone.
            self._log_from, self._is_copied = held.head.version, False
        elif self._log_from is None:
            self._log_from, self._is_copied = before or held.head.version, before is not None
        spans = encoded_spans(held.table)
        with self._changing:
            # What was fetched, or applied before a fault, is of this version already: its places are not known.
            self._changed = dict.fromkeys(self._differing(held))
            run_all(pool, [partial(self._apply_beside, held, i, spans[i]) for i in lacking])
            self._ahead = Ahead()
            if self.in_memory and before is not None and before == held.head.base:
                self._trail.add(before, held.head.version, self._changed)

    def _differing(self, held: HeldVersion) -> list[int]:
        """Return the regions in which a version differs from the last one that the map held as a whole."""
        before = self._current.table.regions if self._current is not None else ()
        pairs = enumerate(zip(before, held.table.regions, strict=False))
        return [index for index, (then, now) in pairs if then.decoded_digest != now.decoded_digest]

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
            and self._map.holds[index] == base.table.regions[index].decoded_digest
        )

    def _apply_beside(self, held: HeldVersion, index: int, encoded: ByteSpan) -> None:
        entry = held.table.regions[index]
        if entry.codec != "sparse":
            self._map.put(index, self._decoded(held, index, encoded), entry.decoded_digest)
            self._changed[index] = None
            return
        taken = self._ahead.take(held.version, index, entry.decoded_digest)
        places, words = taken or self._decode_sparse(held, index, encoded)
        self._map.change(index, places, words, entry.decoded_digest)
        self._changed[index] = places if self.in_memory else None

    def _decode_ahead(self, held: Held, index: int, encoded: ByteSpan) -> None:
        is_sparse = held.table.regions[index].codec == "sparse"
        if is_sparse and self._ahead.nbytes < self._spare_bytes:
            with suppress(ProtocolError):  # `apply` says so
                changes = self._decode_sparse(held, index, encoded)
                self._ahead.put(index, held.table.regions[index].decoded_digest, *changes)

    def _decode_sparse(self, held: Held, index: int, encoded: ByteSpan) -> tuple[Places, Words]:
        base = self.content(index)
        at, words = decode_changes(held.chunks.encoded(encoded), base)
        beside = np.frombuffer(base, dtype=np.uint8).copy()
        beside[: beside.size // 2 * 2].view("<u2")[at] = words
        if digest(beside.data) != held.table.regions[index].decoded_digest:
            raise ProtocolError(f"region {index} does not decode to what the learner signed")
        # Two runs that ascend, merged.
        order = np.argsort(at, kind="stable")
        return at[order].astype(np.uint32), words[order]

    def _decoded(self, held: HeldVersion, index: int, encoded: ByteSpan) -> Buffer:
        """Return a region of a version, proven. Raise ProtocolError if it is not what the learner signed."""
        span, entry = self.regions[index], held.table.regions[index]
        base = self.content(index) if entry.codec not in WHOLE else None
        beside = decode_region(entry.codec, held.chunks.encoded(encoded), span.nbytes, self.dtypes[index], base)
        if digest(beside) != entry.decoded_digest:
            raise ProtocolError(f"the region at {span.start} does not decode to what the learner signed")
        return beside

    # -- the disk --------------------------------------------------------------------------------------------

    def restore(self, versions: Sequence[HeldVersion], pool: Executor | None = None) -> None:
        """Make the regions that the map has lost, or held at an older version, from the copy and from the encodings of
        `versions`. What cannot be made is fetched later."""
        if self._current is None:
            return
        log = Log(versions, self._current.head.version)
        tables = [version.table for version in (self._current, self._target) if version is not None]
        held = enumerate(self._map.holds)
        lost = [i for i, holds in held if holds not in [table.regions[i].decoded_digest for table in tables]]
        run_all(pool, [partial(self._restore_region, log, index) for index in lost])
        self._log_from = log.versions[0].head.version if log.versions else None
        self._settle()

    def copy_is_due(self, versions: Sequence[HeldVersion]) -> bool:
        """Return whether the encodings since the last copy are as many bytes as a copy, too many, or do not suffice."""
        if self.version is None or self.log_from is None:
            return False
        log = [held for held in Log(versions, self.version).versions if held.head.version >= self.log_from]
        # What was fetched by regions is in no encoding that is kept here.
        if not log or log[0].head.version != self.log_from:
            return True
        since = log[1:] if self._is_copied else log
        is_tight = free_bytes(self._current_path.parent) < self.layout.total_bytes
        most = self.layout.total_bytes // (TIGHT_SHARE if is_tight else 1)
        return sum(held.table.encoded_bytes for held in since) >= most or len(log) >= MAX_LOG

    def copy_out(self, stop: threading.Event) -> bool:
        """Bring the copy up to date; after that, older encodings are needed no more. The map may be changed meanwhile,
        by nothing but `apply`. Return False if `stop` was set, or if a region could not be read: it is damaged, or was
        changed twice meanwhile."""
        if self._current is None or self._copy is None:
            return False
        # Each region is of this version now, or of a later one.
        began_at = self._current.head.version
        for index in range(len(self.regions)):
            if stop.is_set() or not (self._copy_region(index) or self._copy_region(index)):
                return False
        # Only then may the encodings go that the copy could be made from.
        self._copy.sync()
        self._log_from, self._is_copied = began_at, True
        return True

    def _copy_region(self, index: int) -> bool:
        """Write a region to the copy, if there is one. Return False if it is not what the map should hold."""
        holds = self._map.holds[index]
        if self._copy is None or holds == self._copy.holds[index]:
            return True
        content = bytes(self.content(index))
        if digest(content) != holds:
            return False
        self._copy.put(index, content, holds)
        return True

    def _restore_region(self, log: Log, index: int) -> None:
        span, dtype = self.regions[index], self.dtypes[index]
        for holds, content in self._sources(index):
            made = log.replay(index, span.nbytes, dtype, holds, content)
            if made is not None:
                self._map.put(index, made, log.versions[-1].table.regions[index].decoded_digest)
                return

    def _sources(self, index: int) -> list[tuple[bytes, Buffer]]:
        """Return what a region can be made from, each with its digest: what the map has, and what the copy has."""
        here: list[tuple[bytes, Buffer]] = [(self._map.holds[index], self.content(index))]
        return here if self._copy is None else [*here, (self._copy.holds[index], self._copy.content(index))]

    # -- files -----------------------------------------------------------------------------------------------

    @property
    def _after_exchange(self) -> Path:
        return self._current_path.with_name("weights.next")

    def _open_map(self, directory: Path) -> RegionFile:
        if self._after_exchange.exists():
            # Cut off between two renames of `exchange`. The old map, if it still lies here, is of no more use.
            os.replace(self._after_exchange, self.path)
        if self._memory is None:
            return RegionFile(self.path, self.regions)
        self._memory.mkdir(mode=0o700, exist_ok=True)
        self._lock = claim(self._memory)
        self._copy = copy = RegionFile(directory / "weights.bin", self.regions)
        is_left = self.path.exists()
        found = RegionFile(self.path, self.regions)
        for index, holds in enumerate(copy.holds):
            if not is_left and holds != UNKNOWN:
                found.put(index, copy.content(index), holds)
        copy.rest()
        return found

    def _read_record(self, path: Path) -> SignedVersion | None:
        """Return a record that its learner signed. Remove anything else."""
        try:
            record = decode(path.read_bytes(), MapRecord, cap_bytes=RECORD_BYTES)
            return SignedVersion.read(record.sealed_head, record.table_bytes, self._learner_key, self.layout)
        except FileNotFoundError:
            return None
        except ProtocolError:
            path.unlink()
            return None

    def _settle(self) -> None:
        """Find which version the map holds as a whole, and record it if it has just become whole."""
        if self._target is not None and not self.lacking(self._target.table):
            os.replace(self._target_path, self._current_path)
            self._current, self._target = self._target, None
        whole = self._current is not None and not self.lacking(self._current.table)
        self.version = self._current.head.version if self._current is not None and whole else None


def open_weights(store: VersionStore, pool: Executor | None = None, memory: Path | None = None) -> WeightMap:
    """Open the map beside the versions of a store, or in the directory `memory`. Make again what was lost, and apply
    what is here and can be applied. Then drop what no longer has to be stored."""
    assert store.layout is not None
    weights = WeightMap(store.directory, store.layout, store.learner_key, memory)
    weights.restore(store.versions(), pool)
    unfinished = weights.unfinished
    # The version that was begun comes first: its base is half overwritten.
    for held in sorted(store.versions(), key=lambda held: (held.head.version != unfinished, held.head.version)):
        if held.chunks.complete and weights.can_become(held):
            weights.apply(held, pool)
    store.keep_from = weights.log_from
    store.prune()
    return weights


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
