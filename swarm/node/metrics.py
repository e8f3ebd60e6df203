"""A run's files: the resolved configuration, one JSON line per learner step, one per event."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from swarm.errors import UserError


class RunLog:
    """Appends to metrics.jsonl and events.jsonl. Lines are flushed: they are few, and a run may be killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._metrics = _open(directory / "metrics.jsonl")
        self._events = _open(directory / "events.jsonl")

    def metrics(self, figures: Mapping[str, Any]) -> None:
        """One learner step."""
        _write(self._metrics, figures)

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened, with the wall clock for people."""
        _write(self._events, {"time": round(time.time(), 3), "kind": kind, **fields})

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def create_run_directory(path: Path, config: Mapping[str, Any]) -> None:
    """Make `path` for a new run and write its configuration. UserError if it holds anything already."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UserError(f"{path} already holds a run or other files: choose another --run-dir")
        (path / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to the run directory {path}: {error.strerror}") from error


def _open(path: Path) -> TextIO:
    return path.open("a", buffering=1)


def _write(file: TextIO, fields: Mapping[str, Any]) -> None:
    file.write(json.dumps(fields) + "\n")
