"""A run's figures on disk: one JSON line per learner step, one per event."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINES_KEPT = 10_000
"""Lines that wait for room on a full disk: an hour of a fast run. More are lost, the oldest first."""


class RunLog:
    """Appends to metrics.jsonl and events.jsonl, whole lines. What does not fit on a full disk is written later."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._metrics = _Lines(directory / "metrics.jsonl")
        self._events = _Lines(directory / "events.jsonl")
        self.last_step = max((int(line["step"]) for line in self._metrics.found), default=0)
        """The last learner step that a former life wrote down."""
        self.held_out = [
            {"version": line["version"], "exact_match": line["exact_match"]}
            for line in self._events.found
            if line["kind"] == "evaluated"
        ]
        """What a former life measured."""
        self._metrics.found, self._events.found = [], []

    def metrics(self, figures: Mapping[str, Any]) -> None:
        """One learner step. One that is trained on again after a crash is written once."""
        if figures["step"] > self.last_step:
            self.last_step = figures["step"]
            self._metrics.add(figures)

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened, with the wall clock for people."""
        self._events.add({"time": round(time.time(), 3), "kind": kind, **fields})

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


class _Lines:
    """A file of JSON lines. `found` are those of a former life; a line that a crash cut off is removed."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        content = path.read_bytes()
        self._nbytes = content.rfind(b"\n") + 1
        os.ftruncate(self._descriptor, self._nbytes)
        self.found: list[dict[str, Any]] = [json.loads(line) for line in content[: self._nbytes].splitlines()]
        self._waiting: deque[bytes] = deque(maxlen=LINES_KEPT)

    def add(self, fields: Mapping[str, Any]) -> None:
        self._waiting.append(json.dumps(fields).encode() + b"\n")
        while self._waiting and self._write(self._waiting[0]):
            self._waiting.popleft()

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, line: bytes) -> bool:
        """False, and nothing written, if the disk has no room for all of it."""
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            written = 0
        if written < len(line):
            os.ftruncate(self._descriptor, self._nbytes)
            return False
        self._nbytes += written
        return True
