"""Files under a state directory: room is taken beforehand, small files are replaced as a whole. Blocking."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from swarm.broadcast.version.manifest import ByteSpan
from swarm.errors import UserError
from swarm.files import write_atomically

SPARE_BYTES = 64 * 1024 * 1024  # Left free on the disk for logs, the journal and other programs
COPY_BYTES = 64 * 1024 * 1024  # Copied at a time, so that a copy needs little memory
BLOCK_BYTES = 512  # Unit of st_blocks, whatever the file system's own blocks are


_max_bytes: dict[Path, int] = {}
"""What the owner of this machine lets the files of a directory and of those in it take."""


class DiskFull(UserError):
    """The disk has no room for a file. The message says how much to free, and where."""


def set_most_bytes(directory: Path, nbytes: int | None) -> None:
    """Let the files under `directory` take `nbytes` at most; None lifts that. Files that are there stay."""
    _max_bytes.pop(directory.absolute(), None)
    if nbytes is not None:
        _max_bytes[directory.absolute()] = nbytes


def _require_allowed(directory: Path, nbytes: int, what: str) -> None:
    for top in (directory.absolute(), *directory.absolute().parents):
        if (most := _max_bytes.get(top)) is not None:
            used = sum(file_bytes(path) for path in top.rglob("*"))
            if used + nbytes > most:
                needed = f"the weights take {(used + nbytes) / 1e9:.3g} GB of the disk with {what}"
                raise DiskFull(f"{needed}, and max-disk allows {most / 1e9:.3g}: allow more, or leave this swarm")


def file_bytes(path: Path) -> int:
    """Return what a file takes of the disk; 0 if it is not there, or is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # Removed by another thread since it was listed
        return 0
    return found.st_blocks * BLOCK_BYTES if stat.S_ISREG(found.st_mode) else 0


def free_bytes(directory: Path) -> int:
    """Return how many bytes may still be written to the disk of `directory`."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def require_room(directory: Path, nbytes: int, what: str) -> None:
    """Raise DiskFull unless `nbytes` more fit on the disk of `directory`."""
    _require_allowed(directory, nbytes, what)
    missing = nbytes + SPARE_BYTES - free_bytes(directory)
    if nbytes and missing > 0:
        raise _full(directory, what, missing)


def allocate(descriptor: int, nbytes: int, path: Path) -> None:
    """Give an open file exactly `nbytes`, with blocks behind all of them. Raise DiskFull if the disk has too few.

    The blocks are taken in advance, because a write through a memory map into a block that the disk cannot give kills
    the process (SIGBUS).
    """
    state = os.fstat(descriptor)
    if state.st_size != nbytes:
        os.ftruncate(descriptor, min(nbytes, state.st_size))
    require_room(path.parent, max(0, nbytes - min(nbytes, state.st_blocks * BLOCK_BYTES)), path.name)
    if nbytes == 0:
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            _fill(descriptor, min(nbytes, state.st_size), nbytes)
    except OSError as error:
        raise disk_error(error, path, nbytes) from error


def _fill(descriptor: int, start: int, end: int) -> None:
    zeros = bytes(1 << 20)
    while start < end:
        start += os.pwrite(descriptor, zeros[: end - start], start)


def write_at(descriptor: int, data: bytes | bytearray | memoryview, start: int, path: Path) -> None:
    left = memoryview(data).cast("B")
    try:
        while left:
            written = os.pwrite(descriptor, left, start)
            left, start = left[written:], start + written
    except OSError as error:
        raise disk_error(error, path, len(left)) from error


def copy_parts(source: Path, to: Path, parts: Iterable[ByteSpan]) -> None:
    """Make `to` a file of the size of `source` with the same bytes at `parts` and holes elsewhere, which take no room.
    Raise DiskFull or OSError."""
    with source.open("rb") as there, to.open("wb") as here:
        size = os.fstat(there.fileno()).st_size
        for part in parts:
            require_room(to.parent, part.nbytes, to.name)
            for at in range(part.start, part.end, COPY_BYTES):
                write_at(here.fileno(), os.pread(there.fileno(), min(COPY_BYTES, part.end - at), at), at, to)
        here.truncate(size)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a small file: after a crash it is as it was, or holds all of `content`.

    After a power cut it may be broken, and readers treat it as missing. Waiting for the disk took 0.1 s and more while
    chunks were being written. Other nodes can give a receiver again what it lost, and a learner that lost its last
    version begins another incarnation with all of it.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise disk_error(error, path, len(content)) from error


def map_file(path: Path, nbytes: int) -> memoryview:
    """Return a read-only view of a file's first `nbytes` bytes. The mapping ends with the last part of the view."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ))


def rest(view: memoryview) -> None:
    """Let go of the memory of a mapped file: most of what was read and written is not needed again, and comes back."""
    if isinstance(mapped := view.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def disk_error(error: OSError, path: Path, nbytes: int) -> Exception:
    """Return DiskFull if that is the reason, else the error itself."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return _full(path.parent, path.name, nbytes + SPARE_BYTES) if full else error


def _full(directory: Path, what: str, missing: int) -> DiskFull:
    return DiskFull(f"the disk of {directory} has no room for {what}: free {-(-missing // 1_000_000)} MB there")
