"""Answers without a verdict, on disk: generated rollouts survive an outage and the end of this process.

Each batch is one file, STATE_DIR/spool/SWARM/NUMBER.batch: the BLAKE3 of the rest, then msgpack. If the process is
killed, a file is whole or absent; a power cut may damage it, which its digest shows. There are few: nothing is drawn
before those of an earlier process were handed in. Handing in twice is harmless. Calls block; batches are kept one
after another.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from swarm.broadcast.store.disk import replace_file, require_room
from swarm.errors import UserError
from swarm.rollout.messages import Answer
from swarm.wire import digest

MAX_AGE_S = 86_400.0  # A day, the longest time limit of a lease. Anything older is stale.
DIGEST_BYTES = 32  # BLAKE3, before the content


class Spool:
    """The spool of one swarm. Old batches, and batches of other swarms under `directory`, are removed. `say` is called
    in the caller's thread if a batch cannot be kept."""

    def __init__(self, directory: Path, swarm: str, say: Callable[[str], None]) -> None:
        self._directory = directory / swarm
        self._say = say
        self._broken = False
        for other in directory.glob("*"):
            if other != self._directory:
                shutil.rmtree(other, ignore_errors=True)
        for path in (*self._directory.glob("*.partial"), *self.files()):
            if path.suffix == ".partial" or time.time() - path.stat().st_mtime > MAX_AGE_S:
                path.unlink()
        self._next = max((int(path.stem) for path in self.files()), default=0) + 1

    def keep(self, answers: Sequence[Answer]) -> Path | None:
        """Write a batch and return its file, or None if there is no room, which is reported the first time."""
        body = msgspec.msgpack.encode(answers)
        content = digest(body) + body
        path = self._directory / f"{self._next:012d}.batch"
        self._next += 1
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            require_room(self._directory, len(content), "the spool")
            replace_file(path, content)
        except (UserError, OSError) as fault:
            if not self._broken:
                self._say(f"{fault}; until there is room, answers are lost if this node ends")
            self._broken = True
            return None
        self._broken = False
        return path

    def files(self) -> list[Path]:
        """Return the kept batches, oldest first."""
        return sorted(path for path in self._directory.glob("*.batch") if path.stem.isdecimal())

    def read(self, path: Path) -> list[Answer]:
        """Return a batch. If it is damaged, remove the file and return an empty list."""
        try:
            content = path.read_bytes()
            if digest(content[DIGEST_BYTES:]) != content[:DIGEST_BYTES]:
                raise ValueError("its digest does not match")
            return msgspec.msgpack.decode(content[DIGEST_BYTES:], type=list[Answer])
        except (OSError, ValueError) as fault:
            self._say(f"a spooled batch is damaged and is left out: {fault}")
            self.remove(path)
            return []

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
