"""A run's figures on disk: one JSON line per learner step, one per event, and files for TensorBoard beside them.

A thread of its own imports the package tensorboard and writes, so that the node's loop waits for neither. Between them
is a bounded queue; what finds no room in it is in metrics.jsonl alone. Names are TRL's as TensorBoard shows them:
`train/NAME` by learner step and `eval/NAME` by policy version. A resumed run writes a file of its own. It begins with a
mark that has TensorBoard forget what it knew from a step on, and with those steps again: the last ones before a crash
may not have come to the disk.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from queue import Full, Queue
from typing import Any, NamedTuple

from swarm.errors import UserError
from swarm.types import NodeId

DIRECTORY = "tensorboard"
STEPS_REPEATED = 200  # Of a former life, written again: far more than what a crash keeps from the disk, and few

WAITING_STEPS = 1000
"""Steps in the queue: minutes of a fast run, 10 MB. A disk that stands still for longer leaves some out."""

CLOSE_S = 10.0  # Longest wait at the end for what is in the queue
NO_FIGURES = frozenset({"step", "time", "version", "kind", "prompts", "samples"})

EVAL_PREFIX = "eval_"
"""How the names begin in a line of metrics.jsonl of what the event `evaluated` says with the version it is about."""


class Scalars(NamedTuple):
    """Figures by their TensorBoard names; `time` is the wall clock."""

    step: int
    time: float
    values: dict[str, float]


def of_step(figures: Mapping[str, Any]) -> Scalars:
    """A line of metrics.jsonl."""
    return _scalars("train", figures["step"], figures)


def of_evaluation(event: Mapping[str, Any]) -> Scalars:
    """An event `evaluated`."""
    return _scalars("eval", event["version"], event)


class EventFiles:
    """Writes one file. `steps` and `evaluations` are lines that former lives have logged, in order; the thread goes
    through them. `last` is the last step in them.

    UserError if the package is missing.
    """

    def __init__(
        self,
        directory: Path,
        steps: Iterable[Mapping[str, Any]] = (),
        evaluations: Iterable[Mapping[str, Any]] = (),
        *,
        last: int = 0,
    ) -> None:
        if find_spec("tensorboard") is None:
            raise UserError("--tensorboard needs the package: pip install 'echo-node[tensorboard]', or leave it out")
        directory.mkdir(exist_ok=True)
        number = len(list(directory.iterdir()))
        # Readers take the files of a directory by name: by time, and within a second by number.
        self.path = directory / f"events.out.tfevents.{int(time.time()):010}.{number:06}.echo-node"
        since = last - STEPS_REPEATED if last and number else -1
        self._before = chain(
            (of_step(line) for line in steps if line["step"] > since),
            (of_evaluation(line) for line in evaluations if line["version"] > since),
        )
        self._first = since + 1
        self._queue: Queue[Scalars | None] = Queue(WAITING_STEPS)
        self.left_out = 0
        """Lines that found no room in the queue."""
        self.fault = ""
        """Why nothing is written any more."""
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, scalars: Scalars) -> None:
        """Hand on to the thread; returns at once."""
        try:
            self._queue.put_nowait(scalars)
        except Full:
            self.left_out += 1

    def close(self) -> None:
        """Wait until what was added is in the file, for CLOSE_S at most."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except Full:
            return
        self._thread.join(CLOSE_S)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write()
        except (OSError, ImportError) as error:
            self.fault = f"{self.path.name} is not written any more: {error}"
            while self._queue.get() is not None:
                pass

    def _write(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self.path.open("wb") as file:
            writer = RecordWriter(file)
            for record in _opening(self._first):
                writer.write(record)
            for scalars in self._before:
                writer.write(_record(scalars))
            file.flush()
            while (waiting := self._queue.get()) is not None:
                writer.write(_record(waiting))
                if self._queue.empty():
                    file.flush()


def _opening(step: int) -> list[bytes]:
    """The version of the format, and the mark that has readers forget what they know from `step` on."""
    from tensorboard.compat.proto import event_pb2

    now = time.time()
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    events = (
        event_pb2.Event(wall_time=now, file_version="brain.Event:2"),
        event_pb2.Event(wall_time=now, step=step, session_log=start),
    )
    return [event.SerializeToString() for event in events]


def _record(scalars: Scalars) -> bytes:
    from tensorboard.compat.proto import event_pb2, summary_pb2

    values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in scalars.values.items()]
    event = event_pb2.Event(wall_time=scalars.time, step=scalars.step, summary=summary_pb2.Summary(value=values))
    record: bytes = event.SerializeToString()
    return record


def _scalars(prefix: str, step: int, found: Mapping[str, Any]) -> Scalars:
    values = {
        f"{prefix}/{name}": float(value)
        for name, value in found.items()
        if name not in NO_FIGURES and not name.startswith(EVAL_PREFIX)
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Scalars(step, float(found.get("time", time.time())), values)


LINES_KEPT = 10_000  # Lines that wait for room on a full disk: an hour of a fast run. More are lost, the oldest first.

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
