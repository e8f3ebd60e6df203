"""Payload files (segments) of the journal. A segment's number is the batch that was next when its rollouts came.

A payload is an encoded Rollout. Its row holds segment, offset, size and digest, so a segment has no inner structure,
and bytes that no row refers to do no harm. Files are only appended to. All calls block; only the journal's thread
writes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from swarm.errors import EchoError
from swarm.wire import digest

DIGEST_BYTES = 16  # Bytes of BLAKE3 in each row: half of the digest is enough to rule out chance and damage

SPARE_BYTES = 16 * 1024 * 1024
"""Left free on the disk, so that SQLite can move the write-ahead log to the database. The broadcast leaves four times
as much, so that versions pause before the journal does."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Errors that more room fixes: a full disk, a quota, `ulimit -f`
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
    """Raise NoRoom unless `nbytes` more fit on the disk of `directory`."""
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
    """Appends payloads. `unsynced` lists segments of an earlier process that may not have reached the disk. Files are
    opened for each call, which takes 10 microseconds of a transaction's milliseconds."""

    def __init__(self, directory: Path, *, unsynced: Sequence[int]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._unsynced = set(unsynced)
        self._before: dict[int, int] = {}

    def append(self, payloads: Sequence[tuple[int, bytes]]) -> list[Stored]:
        """Append payloads to their segments, with one write for neighbours in the same segment. Until the next call
        `undo` can remove them. Raise NoRoom and keep none if they do not all fit."""
        self._before = {}
        stored: list[Stored] = []
        try:
            for segment, some in groupby(payloads, key=itemgetter(0)):
                stored += self._append(segment, [payload for _, payload in some])
        except OSError as error:
            self.undo()
            if error.errno in NO_ROOM:
                raise no_room(self._directory, SPARE_BYTES + sum(len(payload) for _, payload in payloads)) from None
            raise
        return stored

    def undo(self) -> None:
        """Cut off what the last `append` wrote."""
        for segment, end in self._before.items():
            os.truncate(segment_path(self._directory, segment), end)
        self._before = {}

    def sync(self) -> None:
        """Make everything that was appended survive a power cut."""
        for segment in sorted(self._unsynced):
            sync_path(segment_path(self._directory, segment))
        self._unsynced.clear()
        sync_path(self._directory)

    def remove(self, segments: Sequence[int]) -> None:
        for segment in segments:
            self._unsynced.discard(segment)
            segment_path(self._directory, segment).unlink(missing_ok=True)

    def _append(self, segment: int, parts: Sequence[bytes]) -> list[Stored]:
        with segment_path(self._directory, segment).open("ab") as file:
            self._unsynced.add(segment)
            at = file.tell()
            self._before.setdefault(segment, at)
            file.write(b"".join(parts))
        starts = accumulate(map(len, parts), initial=at)
        return [Stored(segment, start, len(p), payload_digest(p)) for start, p in zip(starts, parts, strict=False)]


def read_payload(directory: Path, place: Stored) -> bytes | None:
    """Return the payload at `place`, or None if it is pruned, lost or damaged."""
    try:
        with segment_path(directory, place.segment).open("rb", buffering=0) as file:
            payload = os.pread(file.fileno(), place.nbytes, place.offset)
    except FileNotFoundError:
        return None
    return payload if len(payload) == place.nbytes and payload_digest(payload) == place.digest else None
