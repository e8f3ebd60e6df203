"""A run's figures on disk: one JSON line per learner step, one per event."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.node.eventfiles import DIRECTORY, EventFiles, of_evaluation, of_step
from swarm.types import NodeId

LINES_KEPT = 10_000
"""Lines that wait for room on a full disk: an hour of a fast run. More are lost, the oldest first."""

HELD_OUT = ("version", "exact_match", "pass_at_1", "pass_at_k", "reward", "samples")
"""What an event `evaluated` says of a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run has cost, and for how much."""

    total: float = 0.0
    steps: int = 0
    rollouts: int = 0
    tokens: int = 0

    def and_more(self, *, total: float, steps: int, rollouts: int, tokens: int) -> Spent:
        return Spent(
            total=self.total + total,
            steps=self.steps + steps,
            rollouts=self.rollouts + rollouts,
            tokens=self.tokens + tokens,
        )

    def over(self, count: int) -> float | None:
        """The cost of one; None of none."""
        return self.total / count if count else None


class RunLog:
    """Appends to metrics.jsonl and events.jsonl, whole lines. What does not fit on a full disk is written later.

    With `tensorboard` figures go into event files besides. UserError if that package is missing.
    """

    def __init__(self, directory: Path, *, tensorboard: bool = False) -> None:
        self.directory = directory
        self._metrics = _Lines(directory / "metrics.jsonl")
        self._events = _Lines(directory / "events.jsonl")
        self.last: Mapping[str, Any] = self._metrics.found[-1] if self._metrics.found else {}
        """Of the last learner step that was written down, in whatever life."""
        self.held_out = [
            {name: line[name] for name in HELD_OUT if name in line}
            for line in self._events.found
            if line["kind"] == "evaluated"
        ]
        """What a former life measured."""
        self.max_staleness_seen = max((int(line.get("staleness/max", 0)) for line in self._metrics.found), default=0)
        """Of all steps that a former life wrote down."""
        self.absent = _samplers(self._events.found)
        """Samplers that were there when a former life ended."""
        self.spent = _spent([*self._metrics.found, *self._events.found])
        """By former lives."""
        self._board = self._open_board() if tensorboard else None
        self._metrics.found, self._events.found = [], []

    def metrics(self, figures: Mapping[str, Any]) -> None:
        """One learner step. One that is trained on again after a crash is written once."""
        if figures["step"] > self.last.get("step", 0):
            self.last = figures
            self._metrics.add(figures)
            if self._board is not None:
                self._board.add(of_step(figures))

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened, with the wall clock for people."""
        line = {"time": round(time.time(), 3), "kind": kind, **fields}
        self._events.add(line)
        if self._board is not None and kind == "evaluated":
            self._board.add(of_evaluation(line))
        if self._board is not None and self._board.fault:
            fault, self._board = self._board.fault, None
            self.event("tensorboard_failed", reason=fault)

    def close(self) -> None:
        """Blocks for as long as TensorBoard's file takes, seconds at most."""
        if self._board is not None:
            self._board.close()
            if self._board.left_out:
                self.event("tensorboard_left_out", lines=self._board.left_out)
        self._metrics.close()
        self._events.close()

    def _open_board(self) -> EventFiles:
        """With what former lives have logged."""
        evaluated = (line for line in self._events.found if line["kind"] == "evaluated")
        before = [*map(of_step, self._metrics.found), *map(of_evaluation, evaluated)]
        return EventFiles(self.directory / DIRECTORY, before)


def _spent(lines: Iterable[Mapping[str, Any]]) -> Spent:
    """By the lines that say it, of steps and of ends of lives: it only grows. Those of steps that were trained again
    do not."""
    told = [line for line in lines if "cost_total" in line and "rollouts_accepted" in line]
    return Spent(
        total=max((line["cost_total"] for line in told), default=0.0),
        steps=max((line["step"] for line in told), default=0),
        rollouts=max((line["rollouts_accepted"] for line in told), default=0),
        tokens=max((line["tokens_accepted"] for line in told), default=0),
    )


def _samplers(events: Iterable[Mapping[str, Any]]) -> set[NodeId]:
    """Who came and did not go, by the events of a run."""
    here: set[NodeId] = set()
    for event in events:
        if event["kind"] == "sampler_joined":
            here.add(event["node"])
        elif event["kind"] in ("sampler_left", "sampler_silent"):
            here.discard(event["node"])
    return here


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
