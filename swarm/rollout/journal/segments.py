"""Payload files of the journal. A segment is named by the batch that was next when its rollouts came.

A payload is an encoded Rollout. Its row names segment, offset, size and digest, so a segment has no structure of its
own, and bytes that no row names do no harm. Files are only appended to. Blocking; the writing half belongs to the
journal's thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from swarm.errors import EchoError
from swarm.net.wire import digest

DIGEST_BYTES = 16  # Of BLAKE3, kept in each row: half of it is still more than chance or a disk could match

SPARE_BYTES = 16 * 1024 * 1024
"""Left free on the disk, so that the write-ahead log can be worked into the database. A quarter of what the broadcast
leaves free, so that versions pause before the journal does."""

MAX_OPEN = 16  # Segment files held open: answers go to one or two, and a batch is read from S + 1 or so

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write that room would cure: a full disk, a quota, `ulimit -f`."""

SUFFIX = ".rollouts"


class NoRoom(EchoError):
    """The disk has no room for the journal. The message says how much to free, and where."""


class Stored(NamedTuple):
    segment: int
    offset: int
    nbytes: int
    digest: bytes


def segment_path(directory: Path, segment: int) -> Path:
    return directory / f"{segment:08d}{SUFFIX}"


def segments_of(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*" + SUFFIX) if path.stem.isdecimal())


def payload_digest(payload: bytes) -> bytes:
    return digest(payload)[:DIGEST_BYTES]


def no_room(directory: Path, missing: int) -> NoRoom:
    return NoRoom(
        f"the disk of {directory} has no room for the journal: free {max(1, -(-missing // 1_000_000))} MB there; "
        "the run waits and then goes on by itself"
    )


def require_room(directory: Path, nbytes: int) -> None:
    """NoRoom unless `nbytes` more fit on the disk of `directory`."""
    found = os.statvfs(directory)
    missing = nbytes + SPARE_BYTES - found.f_bavail * found.f_frsize
    if missing > 0:
        raise no_room(directory, missing)


def sync_path(path: Path) -> None:
    """Make a file's content, or a directory's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SegmentWriter:
    """Appends payloads. `unsynced`: segments of an earlier process that may not have reached the disk."""

    def __init__(self, directory: Path, *, unsynced: Sequence[int]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._open: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._unsynced = set(unsynced)
        self._before: dict[int, int] = {}

    def append(self, payloads: Mapping[int, Sequence[bytes]]) -> dict[int, list[Stored]]:
        """Append the payloads of each segment, with one write each; NoRoom, and none is kept, if they do not all fit.

        Until the next call `undo` takes them back.
        """
        self._before = {}
        stored = {}
        try:
            for segment, parts in payloads.items():
                stored[segment] = self._append(segment, parts)
        except OSError as error:
            self.undo()
            if error.errno in NO_ROOM:
                raise no_room(
                    self._directory, SPARE_BYTES + sum(len(p) for ps in payloads.values() for p in ps)
                ) from None
            raise
        return stored

    def undo(self) -> None:
        """Cut off what the last `append` wrote."""
        for segment, end in self._before.items():
            os.ftruncate(self._open[segment], end)
            self._ends[segment] = end
        self._before = {}

    def sync(self) -> None:
        """Make everything that was appended survive a power cut."""
        for segment in sorted(self._unsynced):
            if segment in self._open:
                os.fsync(self._open[segment])
            else:
                sync_path(segment_path(self._directory, segment))
        self._unsynced.clear()
        sync_path(self._directory)

    def remove(self, segments: Sequence[int]) -> None:
        for segment in segments:
            self._close(segment)
            self._unsynced.discard(segment)
            segment_path(self._directory, segment).unlink(missing_ok=True)

    def close(self) -> None:
        for segment in list(self._open):
            self._close(segment)

    def _append(self, segment: int, parts: Sequence[bytes]) -> list[Stored]:
        descriptor = self._descriptor(segment)
        at = self._before[segment] = self._ends[segment]
        self._unsynced.add(segment)
        left, end = memoryview(b"".join(parts)), at
        while left:
            written = os.pwrite(descriptor, left, end)
            left, end = left[written:], end + written
        stored = []
        for part in parts:
            stored.append(Stored(segment, at, len(part), payload_digest(part)))
            at += len(part)
        self._ends[segment] = at
        return stored

    def _descriptor(self, segment: int) -> int:
        if segment not in self._open:
            while len(self._open) >= MAX_OPEN:
                oldest = min(self._open.keys() - self._before.keys(), default=None)
                if oldest is None:
                    break
                self._close(oldest)
            found = os.open(segment_path(self._directory, segment), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._open[segment], self._ends[segment] = found, os.fstat(found).st_size
        return self._open[segment]

    def _close(self, segment: int) -> None:
        if segment in self._open:
            os.close(self._open.pop(segment))
            del self._ends[segment]


class SegmentReader:
    """Reads payloads back. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, int | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def has(self, segment: int) -> bool:
        """False for a segment that was pruned or lost."""
        return self._descriptor(segment) is not None

    def payload(self, place: Stored) -> bytes | None:
        """The payload; None if it is lost or damaged."""
        descriptor = self._descriptor(place.segment)
        if descriptor is None:
            return None
        payload = os.pread(descriptor, place.nbytes, place.offset)
        return payload if len(payload) == place.nbytes and payload_digest(payload) == place.digest else None

    def _descriptor(self, segment: int) -> int | None:
        if segment not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._close()
            try:
                self._open[segment] = os.open(segment_path(self._directory, segment), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                self._open[segment] = None
        return self._open[segment]

    def _close(self) -> None:
        for descriptor in self._open.values():
            if descriptor is not None:
                os.close(descriptor)
        self._open.clear()
