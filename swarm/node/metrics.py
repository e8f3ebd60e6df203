"""A run's figures on disk: one JSON line per learner step, one per event, and files for TensorBoard beside them.

TensorBoard's file is written by a thread of its own, which also imports the package, so that the node's loop never
waits for it. Its names are TRL's: `train/NAME` by learner step and `eval/NAME` by policy version. A resumed run writes
a new file, which begins with a mark that makes TensorBoard forget everything from a step on, and with the figures from
that step on: the last ones before a crash may not have reached the disk.
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
from typing import Any

from swarm.errors import UserError
from swarm.types import NodeId

STEPS_REPEATED = 200  # Steps of a former life that are written again: far more than a crash keeps from the disk

WAITING_STEPS = 1000
"""Lines in the queue: minutes of a fast run, 10 MB. If the disk stands still for longer, some are left out."""

CLOSE_S = 10.0  # Longest wait at the end for what is in the queue
NO_FIGURES = frozenset({"step", "time", "version", "kind", "prompts", "samples"})

Line = Mapping[str, Any]
"""A line of metrics.jsonl, or an event `evaluated`."""


class EventFiles:
    """Writes one TensorBoard file. `former` are lines that former lives have logged, in order; the thread reads them.
    `last` is the last step in them. UserError if the package is missing."""

    def __init__(self, directory: Path, former: Iterable[Line] = (), *, last: int = 0) -> None:
        if find_spec("tensorboard") is None:
            raise UserError("--tensorboard needs the package: pip install 'echo-node[tensorboard]', or leave it out")
        directory.mkdir(exist_ok=True)
        number = len(list(directory.iterdir()))
        # Readers order the files of a directory by name: by time, and within a second by number.
        self.path = directory / f"events.out.tfevents.{int(time.time()):010}.{number:06}.echo-node"
        self._first = last - STEPS_REPEATED + 1 if last and number else 0
        self._former = former
        self._queue: Queue[Line | None] = Queue(WAITING_STEPS)
        self.left_out = 0
        """Lines that found no room in the queue."""
        self.fault = ""
        """Why nothing is written any more."""
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, line: Line) -> None:
        """Hand a line to the thread; returns at once."""
        try:
            self._queue.put_nowait(line)
        except Full:
            self.left_out += 1

    def close(self) -> None:
        """Wait until what was added is in the file, for CLOSE_S at most."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._write()
        except (OSError, ImportError) as error:
            self.fault = f"{self.path.name} is not written any more: {error}"
            while self._queue.get() is not None:
                pass

    def _write(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        def write(line: Line) -> None:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in _scalars(line)]
            event = Event(wall_time=line.get("time", time.time()), step=_step(line), summary=Summary(value=values))
            writer.write(event.SerializeToString())

        with self.path.open("wb") as file:
            writer, mark = RecordWriter(file), SessionLog(status=SessionLog.START)
            writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            writer.write(Event(wall_time=time.time(), step=self._first, session_log=mark).SerializeToString())
            for line in self._former:
                if _step(line) >= self._first:
                    write(line)
            file.flush()
            while (waiting := self._queue.get()) is not None:
                write(waiting)
                if self._queue.empty():
                    file.flush()


def _step(line: Line) -> int:
    """The learner step or the version that a line is about; -1 if a disk has damaged it."""
    step = line.get("version" if line.get("kind") == "evaluated" else "step")
    return step if isinstance(step, int) else -1


def _scalars(line: Line) -> Iterator[tuple[str, float]]:
    """The figures of a line under their TensorBoard names. `eval_NAME` in metrics.jsonl repeats an evaluation."""
    prefix = "eval" if line.get("kind") == "evaluated" else "train"
    for name, value in line.items():
        is_figure = name not in NO_FIGURES and not name.startswith("eval_")
        if is_figure and isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}/{name}", float(value)


LINES_KEPT = 10_000  # Lines that wait for room on a full disk: an hour of a fast run. The oldest are dropped first.

HELD_OUT = ("version", "exact_match", "pass_at_1", "pass_at_k", "reward", "samples")  # Of an event `evaluated`


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run has cost, and what it got for that."""

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

    With `tensorboard`, figures also go into TensorBoard's files. UserError if that package is missing.
    """

    def __init__(self, directory: Path, *, tensorboard: bool = False) -> None:
        self._metrics = _Lines(directory / "metrics.jsonl")
        self._events = _Lines(directory / "events.jsonl")
        self.last: Mapping[str, Any] = {}
        """The newest line of metrics.jsonl, of this life or a former one."""
        # Of former lives: evaluations, the highest staleness, samplers that were there at the end, and the cost.
        self.held_out: list[dict[str, Any]] = []
        self.max_staleness_seen = 0
        self.absent: set[NodeId] = set()
        self.spent = Spent()
        self._look_back()
        evaluated = (line for line in self._events.earlier() if line.get("kind") == "evaluated")
        former = chain(self._metrics.earlier(), evaluated)
        last = self.last.get("step", 0)
        self._board = EventFiles(directory / "tensorboard", former, last=last) if tensorboard else None

    def metrics(self, figures: Mapping[str, Any]) -> None:
        """Write down one learner step; a step that is trained again after a crash is there already."""
        if figures["step"] > self.last.get("step", 0):
            self.last = figures
            self._metrics.add(figures)
            if self._board is not None:
                self._board.add(figures)

    def event(self, kind: str, **fields: Any) -> None:
        """Write down something that happened, with the wall clock for people."""
        line = {"time": round(time.time(), 3), "kind": kind, **fields}
        self._events.add(line)
        if self._board is not None and kind == "evaluated":
            self._board.add(line)
        if self._board is not None and self._board.fault:
            fault, self._board = self._board.fault, None
            self.event("tensorboard_failed", reason=fault)

    def close(self) -> None:
        """Close all files; blocks for up to twice CLOSE_S."""
        if self._board is not None:
            self._board.close()
            if self._board.left_out:
                self.event("tensorboard_left_out", lines=self._board.left_out)
        self._metrics.close()
        self._events.close()

    def _look_back(self) -> None:
        """Read what former lives have logged, line by line: the log of a long run does not fit into memory."""
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


def _spent(before: Spent, line: Mapping[str, Any]) -> Spent:
    """`before`, or more if `line` (of a step, or of the end of a life) says more; a step trained again says less."""
    if "cost_total" not in line or "rollouts_accepted" not in line:
        return before
    return Spent(
        total=max(before.total, _number(line, "cost_total")),
        steps=max(before.steps, int(_number(line, "step"))),
        rollouts=max(before.rollouts, int(_number(line, "rollouts_accepted"))),
        tokens=max(before.tokens, int(_number(line, "tokens_accepted"))),
    )


def _number(line: Mapping[str, Any], name: str) -> float:
    """A figure of a line; 0 if a disk has damaged it."""
    value = line.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


class _Lines:
    """A file of JSON lines. A last line that a crash cut short is removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with path.open("rb") as file:
            self._earlier = self._nbytes = sum(len(line) for line in file if line.endswith(b"\n"))
        os.ftruncate(self._descriptor, self._nbytes)
        self._waiting: deque[bytes] = deque(maxlen=LINES_KEPT)

    def earlier(self) -> Iterator[dict[str, Any]]:
        """The lines of former lives, read one by one, at any time and in any thread. Damaged lines are skipped."""
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
        """Return False, with nothing written, if the disk has no room for the whole line."""
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
