"""A weight map in memory, so that no disk is rewritten for each version.

Each version changes every region a little. Written to a file, that is the whole model for each version: at one version
a minute an SSD is worn out in weeks. So the map is a file in /dev/shm, which the engine's process maps too. On the disk
lie the encodings as they were received (store.py) and a copy of the map from now and then, `weights.bin` (copy.py). A
process that was killed leaves the map behind. After a power cut each region is made again from its place in the copy,
of whatever version that is, and the encodings since; so is a region that was being overwritten. When these encodings
are as many bytes as the map, the copy is brought up to date: on average twice the received bytes are written.

Sparse regions are decoded and proven while others are still on their way (`decode_ahead`), as lists of words that
change; the map itself changes only when all of a version is here. The places of these words are remembered until the
engine has taken them (changes.py). Blocking; call from threads.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from swarm.broadcast.store.changes import NOTHING, Places, Trail, write_changes
from swarm.broadcast.store.copy import MAX_LOG, DiskCopy, Log
from swarm.broadcast.store.disk import free_bytes
from swarm.broadcast.store.place import claim
from swarm.broadcast.store.store import Held, HeldVersion, VersionStore
from swarm.broadcast.store.weight_map import UNKNOWN, WeightMap, apply_stored, run_all
from swarm.broadcast.version.codec import Buffer, Words, decode_changes
from swarm.broadcast.version.manifest import ByteSpan, Codec, Layout, encoded_spans, is_whole_model
from swarm.errors import ProtocolError
from swarm.types import VersionId
from swarm.wire import digest

TIGHT_SHARE = 8  # On a disk that is nearly full the encodings take at most this part of the map, not as much as the map
AHEAD_SHARE = 16  # What is decoded ahead, and what an engine has yet to take: at most a 16th of the map each

NOTHING_NEW: Words = np.empty(0, dtype="<u2")


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


class MemoryMap(WeightMap):
    """The map in the directory `memory`; its other files are under `directory`."""

    def __init__(self, directory: Path, layout: Layout, learner_key: bytes, memory: Path) -> None:
        memory.mkdir(mode=0o700, exist_ok=True)
        self._memory = memory
        self._lock = claim(memory)
        self._is_copied = False  # Whether the copy holds all of version `log_from`
        self._trail = Trail(layout.total_bytes // AHEAD_SHARE)
        self._changed: dict[int, Places | None] = {}
        self._ahead = Ahead()
        self._changing = threading.Lock()  # Held while regions are decoded ahead, or the map becomes another version
        super().__init__(directory, layout, learner_key)

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
        path = self._memory / "weights.changed"
        write_changes(path, len(self.regions), changed)
        return path

    def put_region(self, index: int, codec: Codec, encoded: bytes | memoryview) -> bool:
        if not super().put_region(index, codec, encoded):
            return False
        # It is in no encoding that is kept here.
        return self._copy_region(index)

    def _apply_regions(self, held: HeldVersion, lacking: list[int], pool: Executor | None) -> None:
        before = self.last_whole
        if is_whole_model(held.table):
            # All of the map can be made from this version alone.
            self.log_from, self._is_copied = held.head.version, False
        elif self.log_from is None:
            self.log_from, self._is_copied = before or held.head.version, before is not None
        spans = encoded_spans(held.table)
        with self._changing:
            # What was fetched, or applied before a fault, is of this version already: its places are not known.
            self._changed = dict.fromkeys(self._differing(held))
            run_all(pool, [partial(self._apply_beside, held, i, spans[i]) for i in lacking])
            self._ahead = Ahead()
            if before is not None and before == held.head.base:
                self._trail.add(before, held.head.version, self._changed)

    def _differing(self, held: HeldVersion) -> list[int]:
        """Return the regions in which a version differs from the last one that the map held as a whole."""
        before = self._current.table.regions if self._current is not None else ()
        pairs = enumerate(zip(before, held.table.regions, strict=False))
        return [index for index, (then, now) in pairs if then.decoded_digest != now.decoded_digest]

    def _apply_beside(self, held: HeldVersion, index: int, encoded: ByteSpan) -> None:
        entry = held.table.regions[index]
        if entry.codec != "sparse":
            self._overwrite(index, self._decoded(held, index, encoded), entry.decoded_digest)
            self._changed[index] = None
            return
        taken = self._ahead.take(held.version, index, entry.decoded_digest)
        places, words = taken or self._decode_sparse(held, index, encoded)
        self._holds[index] = UNKNOWN
        self._words(index)[places] = words
        self._holds[index] = entry.decoded_digest
        self._changed[index] = places

    def _decode_ahead(self, held: Held, index: int, encoded: ByteSpan) -> None:
        is_sparse = held.table.regions[index].codec == "sparse"
        if is_sparse and self._ahead.nbytes <= self.layout.total_bytes // AHEAD_SHARE:
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

    def _words(self, index: int) -> Words:
        span = self.regions[index]
        return np.frombuffer(self._writable, dtype="<u2", count=span.nbytes // 2, offset=span.start)

    # -- the disk --------------------------------------------------------------------------------------------

    def restore(self, versions: Sequence[HeldVersion], pool: Executor | None = None) -> None:
        """Make the regions that the map has lost, or held at an older version, from the copy and from the encodings of
        `versions`. What cannot be made is fetched later."""
        if self._current is None:
            return
        log = Log(versions, self._current.head.version)
        tables = [version.table for version in (self._current, self._target) if version is not None]
        lost = [i for i, holds in enumerate(self._holds) if holds not in [t.regions[i].decoded_digest for t in tables]]
        run_all(pool, [partial(self._restore_region, log, index) for index in lost])
        self.log_from = log.versions[0].head.version if log.versions else None
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
        is_tight = free_bytes(self._copy_path.parent) < self.layout.total_bytes
        most = self.layout.total_bytes // (TIGHT_SHARE if is_tight else 1)
        return sum(held.table.encoded_bytes for held in since) >= most or len(log) >= MAX_LOG

    def copy_out(self, stop: threading.Event) -> bool:
        """Bring the copy up to date; after that, older encodings are needed no more. The map may be changed meanwhile,
        by nothing but `apply`. Return False if `stop` was set, or if a region could not be read: it is damaged, or was
        changed twice meanwhile."""
        if self._current is None:
            return False
        # Each region is of this version now, or of a later one.
        began_at = self._current.head.version
        for index in range(len(self.regions)):
            if stop.is_set() or not (self._copy_region(index) or self._copy_region(index)):
                return False
        self._copy.sync()
        self.log_from, self._is_copied = began_at, True
        return True

    def close(self) -> None:
        """Close the files, and give the memory back. The map must not be used any more."""
        super().close()
        self._writable = memoryview(b"")
        self._copy.close()
        shutil.rmtree(self._memory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _copy_region(self, index: int) -> bool:
        holds = self._holds[index]
        if holds == self._copy.holds[index]:
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
                self._overwrite(index, made, log.versions[-1].table.regions[index].decoded_digest)
                return

    def _sources(self, index: int) -> list[tuple[bytes, Buffer]]:
        """Return what a region can be made from, each with its digest: what the map has, and what the copy has."""
        return [(self._holds[index], self.content(index)), (self._copy.holds[index], self._copy.content(index))]

    def _place(self, directory: Path) -> Path:
        self._copy_path = directory / "weights.bin"
        return self._memory / "weights.bin"

    def _open_map(self) -> None:
        is_left = self.path.exists()
        super()._open_map()
        self._writable = memoryview(mmap.mmap(self._descriptor, self.layout.total_bytes))
        self._copy = DiskCopy(self._copy_path, self.regions, UNKNOWN)
        if not is_left:
            for index, holds in enumerate(self._copy.holds):
                if holds != UNKNOWN:
                    self._overwrite(index, self._copy.content(index), holds)

    def _finish_overwriting(self) -> None:
        """There is no redo file: `restore` makes such a region again."""


def open_in_memory(store: VersionStore, memory: Path, pool: Executor | None = None) -> MemoryMap:
    """Open the map in the directory `memory`, and apply what is stored and can be applied."""
    assert store.layout is not None
    weights = MemoryMap(store.directory, store.layout, store.learner_key, memory)
    weights.restore(store.versions(), pool)
    apply_stored(weights, store, pool)
    return weights
