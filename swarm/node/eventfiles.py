"""A run's figures for TensorBoard, as a second place beside metrics.jsonl: RUN_DIR/tensorboard.

A thread of its own imports the package and writes, so that the node's loop waits for neither. Between them is a bounded
queue; what finds no room in it is in metrics.jsonl alone. Names are TRL's as TensorBoard shows them: `train/NAME` by
learner step and `eval/NAME` by policy version.

A life that goes on writes a file of its own. It begins with a mark that has TensorBoard forget what it knew from a step
on, and with those steps again: the last ones before a crash may not have come to the disk.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from queue import Full, Queue
from typing import Any, NamedTuple

from swarm.errors import UserError

DIRECTORY = "tensorboard"

STEPS_REPEATED = 200
"""Of a former life, written again: far more than what a crash keeps from the disk, and few."""

WAITING_STEPS = 1000
"""Steps in the queue: minutes of a fast run, 10 MB. A disk that stands still for longer leaves some out."""

CLOSE_S = 10.0
"""Longest wait at the end for what is in the queue."""

NO_FIGURES = frozenset({"step", "time", "version", "kind", "prompts", "samples"})

HELD_OUT = "eval_"
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
        if name not in NO_FIGURES and not name.startswith(HELD_OUT)
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Scalars(step, float(found.get("time", time.time())), values)
