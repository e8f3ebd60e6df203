"""Where a node's weight map lives: in memory if there is room beside all else, or on the disk, which then wears."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from swarm.broadcast.store.disk import BLOCK_BYTES, free_bytes
from swarm.errors import UserError
from swarm.machine import free_host_bytes

Wanted = Literal["auto", "memory", "disk"]

MEMORY = Path("/dev/shm")  # Linux's file system in memory; elsewhere the map is on the disk
SETTLED_S = 5.0  # A place that is younger may be one that its node is about to claim
VERSIONS_A_DAY = 24 * 60  # One a minute, by which wear is told in words
WARNED_BYTES = 10**12  # Written a day: an SSD of 1 TB is rated for some 600 times as much in all


def place_of_map(directory: Path, nbytes: int, wanted: Wanted, memory_share: float) -> tuple[Path | None, str]:
    """Return the directory in memory for a map of `nbytes`, whose other files lie under `directory`, and a line for the
    person at the terminal, or "". None means on the disk. The map may take `memory_share` of what is free. Blocking.
    Raise UserError if memory is wanted and there is none."""
    sweep(_name(directory))
    place, why = (None, "as asked for") if wanted == "disk" else _room(directory, nbytes, wanted, memory_share)
    if place is not None:
        return place, ""
    forget_place(directory)
    if wanted == "memory":
        raise UserError(f"--weights memory: they take {nbytes / 1e9:.1f} GB, and {why}; free some, or leave it out")
    return None, on_disk_line(nbytes, why)


def on_disk_line(nbytes: int, why: str) -> str:
    """Return what it means that a map of `nbytes` lies on the disk."""
    written = nbytes * VERSIONS_A_DAY
    wear = f", {written / 1e12:.1f} TB a day if one comes each minute" if written > WARNED_BYTES else ""
    return f"the weights are kept on the disk, {why}: each version rewrites {nbytes / 1e9:.1f} GB{wear}"


def forget_place(directory: Path) -> None:
    """Give back the memory of a map that a killed process left, or that nobody needs any more. Blocking."""
    shutil.rmtree(_name(directory), ignore_errors=True)


def sweep(kept: Path | None = None) -> None:
    """Give back the memory of nodes of this user that were killed, but for the place `kept`. Blocking."""
    for left in MEMORY.glob(f"echo-node-{os.geteuid()}-*"):
        with suppress(OSError):
            is_settled = time.time() - left.stat().st_mtime > SETTLED_S
            if left != kept and is_settled and (lock := claim(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def claim(place: Path) -> int | None:
    """Return a descriptor that holds a node's place in memory until it is closed, however the process ends; None if
    another has it. Nobody sweeps away what is held."""
    descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _name(directory: Path) -> Path:
    node = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:16]
    return MEMORY / f"echo-node-{os.geteuid()}-{node}"


def _room(directory: Path, nbytes: int, wanted: Wanted, memory_share: float) -> tuple[Path | None, str]:
    """Return this node's directory in memory, made if it is not there, or None and why there is none."""
    place = _name(directory)
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        # Everybody may make directories there.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return None, f"since {place} is not this user's own"
        # What a killed process left is used again.
        held = sum(path.stat().st_blocks * BLOCK_BYTES for path in place.iterdir())
        free = held + min(free_host_bytes(), free_bytes(MEMORY))
    except OSError:
        return None, f"since this system gives no memory at {MEMORY}"
    if nbytes <= free * (1.0 if wanted == "memory" else memory_share):
        return place, ""
    return None, f"since {free / 1e9:.1f} GB of memory are free, of which they may take {memory_share:.0%}"
