"""Answers without a verdict, on disk: generated rollouts survive an outage and the end of this process.

Each batch is one file, STATE_DIR/spool/SWARM/NUMBER.batch: the BLAKE3 of the rest, then msgpack. If the process is
killed, a file is whole or absent; a power cut may damage it, which its digest shows. Submitting twice is harmless.
Calls block, and any thread may make them.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from swarm.broadcast.store.disk import replace_file, require_room
from swarm.errors import UserError
from swarm.rollout.messages import Answer
from swarm.wire import digest

SPOOL_BYTES = 1 << 30  # Three of the largest batches (4,096 rollouts of 8,192 tokens are 302 MB)
SPOOL_FILES = 64  # A process leaves at most four for its successor to submit: a dozen deaths in one outage
MAX_AGE_S = 86_400.0  # A day, the longest time limit of a lease. Anything older is stale.
DIGEST_BYTES = 32  # BLAKE3, before the content


class Spool:
    """The spool of one swarm. Old batches, and batches of other swarms under `directory`, are removed. `say` is called
    in the caller's thread if a batch cannot be kept."""

    def __init__(self, directory: Path, swarm: str, say: Callable[[str], None]) -> None:
        self._directory = directory / swarm
        self._say = say
        self._lock = threading.Lock()
        self._broken = False
        for other in directory.glob("*"):
            if other != self._directory:
                shutil.rmtree(other, ignore_errors=True)
        for partial in self._directory.glob("*.partial"):
            partial.unlink(missing_ok=True)
        for path in self._files():
            if time.time() - path.stat().st_mtime > MAX_AGE_S:
                path.unlink()
        self._next = max((int(path.stem) for path in self._files()), default=0) + 1

    def keep(self, answers: Sequence[Answer]) -> str | None:
        """Write a batch and return its name, or None if there is no room, which is reported the first time."""
        body = msgspec.msgpack.encode(answers)
        content = digest(body) + body
        with self._lock:
            name = f"{self._next:012d}"
            self._next += 1
            try:
                held = [path.stat().st_size for path in self._files()]
                if len(held) >= SPOOL_FILES or sum(held) + len(content) > SPOOL_BYTES:
                    raise UserError(f"{self._directory} holds {len(held)} batches already")
                self._directory.mkdir(parents=True, exist_ok=True)
                require_room(self._directory, len(content), "the spool")
                replace_file(self._path(name), content)
            except (UserError, OSError) as fault:
                if not self._broken:
                    self._say(f"{fault}; until there is room, answers are lost if this node ends")
                self._broken = True
                return None
            self._broken = False
            return name

    def names(self) -> list[str]:
        """Return the kept batches, oldest first."""
        with self._lock:
            return [path.stem for path in self._files()]

    def read(self, name: str) -> list[Answer]:
        """Return a batch. If it is damaged, remove the file and return an empty list."""
        path = self._path(name)
        try:
            if path.stat().st_size > SPOOL_BYTES:
                raise ValueError("it is larger than the spool may be")
            content = path.read_bytes()
            if digest(content[DIGEST_BYTES:]) != content[:DIGEST_BYTES]:
                raise ValueError("its digest does not match")
            return msgspec.msgpack.decode(content[DIGEST_BYTES:], type=list[Answer])
        except (OSError, ValueError) as fault:
            self._say(f"a spooled batch is damaged and is left out: {fault}")
            self.remove(name)
            return []

    def remove(self, name: str) -> None:
        with self._lock:
            self._path(name).unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _files(self) -> list[Path]:
        return sorted(path for path in self._directory.glob("*.batch") if path.stem.isdecimal())

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.batch"
