"""A run's figures on disk: one JSON line per learner step, one per event, and what TensorBoard and wandb get.

TensorBoard's writer is a thread, so its errors come late. The figures have TRL's names: `train/NAME` by learner step
and `eval/NAME` by policy version. A resumed run writes its whole history again, since the end of a file may not have
reached the disk.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.extras import how_to_have
from swarm.types import NodeId

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
FINISH_S = 60.0  # For wandb to send what it has not sent yet
EVENTS_WAITING, FLUSH_S = 10_000, 1.0  # Of TensorBoard's writer: its queue holds an hour of a fast run
NO_FIGURES = frozenset({"step", "time", "version", "newest_version", "kind", "prompts", "samples", "unaudited"})

Line = Mapping[str, Any]
"""A line of metrics.jsonl or events.jsonl."""


class EventFile:
    """Hands the figures of lines to TensorBoard, and replaces the files of the run's earlier processes. Raises
    UserError if the package is missing, and OSError as `add` does."""

    def __init__(self, run_dir: Path, lines: Iterable[Line]) -> None:
        if find_spec("tensorboard") is None:
            raise UserError(f"--tensorboard needs the package: {how_to_have('tensorboard')}; or leave it out")
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), EVENTS_WAITING, FLUSH_S)
        # A TensorBoard that has read the earlier file drops what it read.
        self._writer.add_event(Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        """Raise OSError if earlier lines could not be written."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if line.get("kind") in (None, "evaluated") and (step := _step(line)) >= 0:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in _scalars(line)]
            event = Event(wall_time=_number(line, "time"), step=step, summary=Summary(value=values))
            self._writer.add_event(event)

    def close(self) -> None:
        with suppress(OSError):
            self._writer.close()


class WandbRun:
    """Hands the figures of lines to wandb's client, which goes where its own variables say, such as WANDB_MODE=offline.
    A resumed run goes on with the same one. Blocking at the start. UserError if it cannot begin."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        if find_spec("wandb") is None:
            raise UserError(f"--wandb needs the package: {how_to_have('wandb')}; or leave it out")
        import wandb

        known = run_dir / "wandb.id"
        if not known.exists():
            known.write_text(secrets.token_hex(8))
        try:
            self._run = wandb.init(
                dir=str(run_dir),
                project="echo-node",
                name=run_dir.name,
                id=known.read_text(),
                resume="allow",
                config=dict(settings),
                # What is printed holds the page's token, and the rest of this says where it runs.
                settings=wandb.Settings(
                    silent=True, console="off", x_disable_meta=True, disable_git=True, finish_timeout=FINISH_S
                ),
            )
        except (wandb.errors.Error, OSError) as error:
            raise UserError(f"--wandb: {' '.join(str(error).split())}; WANDB_MODE=offline sends nothing") from error
        # Evaluations come later than the steps that they are of, and wandb's own count may only rise.
        self._run.define_metric("*", step_metric="step")

    def add(self, line: Line) -> None:
        if line.get("kind") in (None, "evaluated") and (step := _step(line)) >= 0:
            self._run.log({**dict(_scalars(line)), "step": step})

    def close(self) -> None:
        self._run.finish()


def _step(line: Line) -> int:
    """Return the learner step or version of a line; -1 if the line is damaged."""
    step = line.get("version" if line.get("kind") == "evaluated" else "step")
    return step if isinstance(step, int) else -1


def _scalars(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the figures of a line under their TensorBoard names, except `eval_NAME`, which repeats an evaluation."""
    prefix = "eval" if line.get("kind") == "evaluated" else "train"
    for name, value in line.items():
        is_figure = name not in NO_FIGURES and not name.startswith("eval_")
        if is_figure and isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}/{name}", float(value)


LINES_KEPT = 10_000  # Lines that wait for room on a full disk: an hour of a fast run. The oldest are dropped first

HELD_OUT = ("version", "newest_version", "exact_match", "pass_at_1", "pass_at_k", "reward", "samples", "unaudited")
"""Fields of an event `evaluated`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run has cost, and what it got for the money."""

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
        """Return the cost of each of `count` items; None if `count` is 0."""
        return self.total / count if count else None


class RunLog:
    """Appends whole lines to metrics.jsonl and events.jsonl. Lines that do not fit on a full disk are written later.
    With `tensorboard`, figures also go into TensorBoard's files, and with `wandb` to wandb as of a run with these
    settings. Raises UserError if the package for that is missing."""

    def __init__(self, directory: Path, *, tensorboard: bool = False, wandb: Mapping[str, Any] | None = None) -> None:
        self._metrics = _Lines(directory / METRICS)
        self._events = _Lines(directory / EVENTS)
        self.last: Mapping[str, Any] = {}
        """The newest line of metrics.jsonl, which may be from before a restart."""
        # From before a restart: evaluations, highest staleness, samplers then present (absent until back), and cost.
        self.held_out: list[dict[str, Any]] = []
        self.max_staleness_seen = 0
        self.absent: set[NodeId] = set()
        self.spent = Spent()
        self._look_back()
        self._wandb = WandbRun(directory, wandb) if wandb is not None else None
        self._board: EventFile | None = None
        if tensorboard:
            try:
                self._board = EventFile(directory, chain(self._metrics.read(), self._events.read()))
            except OSError as error:
                self.event("tensorboard_failed", reason=str(error))

    def metrics(self, figures: Mapping[str, Any]) -> None:
        """Write the figures of a learner step, unless they are there already because the step is trained again."""
        if figures["step"] > self.last.get("step", 0):
            self.last = figures
            self._metrics.add(figures)
            self._show(figures)

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event, with a wall-clock time for human readers."""
        line = {"time": round(time.time(), 3), "kind": kind, **fields}
        self._events.add(line)
        self._show(line)

    def close(self) -> None:
        """Close all files. This blocks."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            with suppress(Exception):  # The client's: what it keeps is in its own directory
                self._wandb.close()
        self._metrics.close()
        self._events.close()

    def _show(self, line: Line) -> None:
        if self._wandb is not None:
            try:
                self._wandb.add(line)
            except Exception as error:  # noqa: BLE001 - the client's: the run goes on without it
                self._wandb = None
                self.event("wandb_failed", reason=str(error))
        if self._board is not None:
            try:
                self._board.add(line)
            except OSError as error:
                self._board = None
                self.event("tensorboard_failed", reason=str(error))

    def _look_back(self) -> None:
        """Read the existing logs line by line: the log of a long run does not fit into memory."""
        for line in self._metrics.read():
            if isinstance(line.get("step"), int):
                self.last = line
                self.max_staleness_seen = max(self.max_staleness_seen, int(_number(line, "staleness/max")))
                self.spent = _spent(self.spent, line)
        for line in self._events.read():
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
    """Return the larger of `before` and `line`, field by field. A step that is trained again reports less."""
    if "cost_total" not in line or "rollouts_accepted" not in line:
        return before
    return Spent(
        total=max(before.total, _number(line, "cost_total")),
        steps=max(before.steps, int(_number(line, "step"))),
        rollouts=max(before.rollouts, int(_number(line, "rollouts_accepted"))),
        tokens=max(before.tokens, int(_number(line, "tokens_accepted"))),
    )


def _number(line: Mapping[str, Any], name: str) -> float:
    """Return a figure of a line; 0 if it is missing or damaged."""
    value = line.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


class _Lines:
    """A file of JSON lines. Opening it removes a last line that a crash cut short."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with path.open("rb") as file:
            self._nbytes = sum(len(line) for line in file if line.endswith(b"\n"))
        os.ftruncate(self._descriptor, self._nbytes)
        self._waiting: deque[bytes] = deque(maxlen=LINES_KEPT)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects in the file, line by line. Skip damaged lines."""
        with self._path.open("rb") as file:
            for line in file:
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
        """Write a line. Return False, with nothing written, if the disk has no room for the whole line."""
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
