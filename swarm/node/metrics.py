"""A run's figures on disk: one JSON line per learner step, one per event."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
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
        self.last: Mapping[str, Any] = {}
        """Of the last learner step that was written down, in whatever life."""
        self.held_out: list[dict[str, Any]] = []
        """What a former life measured."""
        self.max_staleness_seen = 0
        """Of all steps that a former life wrote down."""
        self.absent: set[NodeId] = set()
        """Samplers that were there when a former life ended."""
        self.spent = Spent()
        """By former lives."""
        self._look_back()
        self._board = self._open_board() if tensorboard else None

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

    def _look_back(self) -> None:
        """What former lives have logged, line by line: of a long run that is more than fits into memory."""
        for line in self._metrics.earlier():
            if isinstance(line.get("step"), int):
                self.last = line
                self.max_staleness_seen = max(self.max_staleness_seen, int(_number(line, "staleness/max")))
                self.spent = _spent(self.spent, line)
        for line in self._events.earlier():
            node = NodeId(str(line.get("node")))
            match line.get("kind"):
                case "evaluated":
                    self.held_out.append({name: line[name] for name in HELD_OUT if name in line})
                case "sampler_joined":
                    self.absent.add(node)
                case "sampler_left" | "sampler_silent":
                    self.absent.discard(node)
            self.spent = _spent(self.spent, line)

    def _open_board(self) -> EventFiles:
        """With what former lives have logged, which its thread reads."""
        evaluated = (line for line in self._events.earlier() if line.get("kind") == "evaluated")
        last = self.last.get("step", 0)
        return EventFiles(self.directory / DIRECTORY, self._metrics.earlier(), evaluated, last=last)


def _spent(before: Spent, line: Mapping[str, Any]) -> Spent:
    """By the lines that say it, of steps and of ends of lives: it only grows. Those of steps that were trained again
    do not."""
    if "cost_total" not in line or "rollouts_accepted" not in line:
        return before
    return Spent(
        total=max(before.total, _number(line, "cost_total")),
        steps=max(before.steps, int(_number(line, "step"))),
        rollouts=max(before.rollouts, int(_number(line, "rollouts_accepted"))),
        tokens=max(before.tokens, int(_number(line, "tokens_accepted"))),
    )


def _number(line: Mapping[str, Any], name: str) -> float:
    """A figure of a line; 0 where a disk has damaged it."""
    value = line.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


class _Lines:
    """A file of JSON lines. A line that a crash cut off is removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with path.open("rb") as file:
            self._earlier = self._nbytes = sum(len(line) for line in file if line.endswith(b"\n"))
        os.ftruncate(self._descriptor, self._nbytes)
        self._waiting: deque[bytes] = deque(maxlen=LINES_KEPT)

    def earlier(self) -> Iterator[dict[str, Any]]:
        """The lines of former lives, read one by one, at any time and in any thread. What a disk has damaged is
        passed over."""
        left = self._earlier
        with self._path.open("rb") as file:
            while left > 0 and (line := file.readline()):
                left -= len(line)
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    yield found

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
