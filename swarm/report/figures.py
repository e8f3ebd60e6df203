"""The figures of a run, from metrics.jsonl and events.jsonl, and curves with a bounded number of points. Of a run that
goes on each look reads what is new."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.report.words import finite as _number
from swarm.run.directory import CONFIG, SUMMARY
from swarm.run.log import EVENTS, METRICS, NO_FIGURES

MAX_POINTS = 300  # Of one curve, more than a screen shows: a page of 40 curves stays under 2 MB
MAX_NAMES = 256  # Of figures; a task with many rewards has some dozens. More are not read.
EVENTS_KEPT = 100  # From each end of a run, and as many again of those that matter
FAULTS = ("alarm", "checkpoint_failed", "decision_failed", "diverged", "public_died", "reward_failed")
CHANGES = ("set", "cost_reached", "paused", "prepared", "stopped", "trainer_restarted", "unpaused")
MATTER = frozenset((*FAULTS, *CHANGES, "tensorboard_failed"))
"""Kinds of events that are kept from the middle of a long run too: faults, restarts and changes by hand."""

MARKED = ("alarm", "trainer_restarted", "diverged", "set")  # Kinds of events that charts mark at their step
PASSING = ("checkpoint", "sampler_joined", "sampler_left", "sampler_silent", "public_died", "prepared")  # The page too
MARKS_KEPT = 100  # Newest of each of these kinds, so that many of one leave room for the others
MARK_LENGTH = 32  # Characters about what happened: as long as an id
LINE_BYTES = 1 << 20  # Longest line that is read as one; ours are a few kB
LINES_A_LOOK = 4096  # Newest lines that a look returns of each file: more than a swarm of thousands writes in a second

Line = Mapping[str, Any]
"""A line of metrics.jsonl or events.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One bucket of a curve: its middle step, and the mean, the smallest and the largest value."""

    step: float
    mean: float
    low: float
    high: float


@dataclass(slots=True)
class Column:
    """The finite values of one figure, by step."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Column:
        column = cls()
        for step, value in points:
            column.add(step, value)
        return column

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def points(self) -> list[Point]:
        """MAX_POINTS at most, of buckets with equally many values each."""
        found, size = [], max(1, -(-len(self.values) // MAX_POINTS))
        for at in range(0, len(self.values), size):
            steps, values = self.steps[at : at + size], self.values[at : at + size]
            mean = math.fsum(values) / len(values)
            found.append(Point(step=(steps[0] + steps[-1]) / 2, mean=mean, low=min(values), high=max(values)))
        return found


class _Ends:
    """The first and the last of many events, in order."""

    def __init__(self) -> None:
        self._first: list[tuple[int, Line]] = []
        self._last: deque[tuple[int, Line]] = deque(maxlen=EVENTS_KEPT)

    def add(self, number: int, event: Line) -> None:
        (self._first if len(self._first) < EVENTS_KEPT else self._last).append((number, event))

    def __iter__(self) -> Iterator[tuple[int, Line]]:
        yield from self._first
        yield from self._last


@dataclass(slots=True, kw_only=True)
class Figures:
    """What the files of a run say. `torn` counts incomplete lines, such as the last one of a killed run."""

    config: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    ran_on: Line = field(default_factory=dict)  # The newest event `prepared`
    columns: dict[str, Column] = field(default_factory=dict)
    evaluated: dict[str, Column] = field(default_factory=dict)  # Figures of held-out prompts, by policy version
    bounds: list[tuple[int, int]] = field(default_factory=list)  # (first step, S)
    times: Column = field(default_factory=Column)  # When each step ended, unix seconds
    marked: dict[str, deque[tuple[float, str]]] = field(default_factory=dict)  # By kind of event
    kinds: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    began: float | None = None
    ended: float | None = None
    torn: int = 0
    _ends: _Ends = field(default_factory=_Ends)
    _that_matter: _Ends = field(default_factory=_Ends)

    @property
    def events(self) -> list[Line]:
        """The first events, the last ones, and some between that matter, in order."""
        together = dict([*self._ends, *self._that_matter])
        return [together[number] for number in sorted(together)]

    @property
    def bound(self) -> int:
        """The largest S that ever held."""
        return max((bound for _, bound in self.bounds), default=0)

    @property
    def state(self) -> str:
        """For people. A run that was killed says nothing of it."""
        if self.summary is not None:
            return str(self.summary.get("state", "finished"))
        last = self.events[-1] if self.events else {}
        return "stopped" if last.get("kind") == "stopped" else "going on, or killed"

    def marks(self, kinds: Iterable[str] = MARKED) -> list[tuple[float, str]]:
        """The newest MARKS_KEPT events of each of `kinds`: at which step, and what happened."""
        return sorted(mark for kind in kinds for mark in self.marked.get(kind, ()))

    def step_at(self, time: float | None) -> float:
        """Return the last step that had ended at `time`, in unix seconds; 0 if none had."""
        before = bisect_right(self.times.values, time) if time is not None else 0
        return self.times.steps[before - 1] if before else 0.0

    def last(self, name: str) -> float | None:
        """The newest value of a figure."""
        return self.columns[name].last if name in self.columns else None


class FigureFiles:
    """The files of a run that may go on: each look reads what was appended since the one before. Blocking."""

    def __init__(self, run_dir: Path) -> None:
        self.figures = Figures(config={}, summary=None)
        self._run_dir = run_dir
        self._read: Counter[str] = Counter()

    def look(self, *, is_last: bool = False) -> tuple[list[Line], list[Line]]:
        """Return the new steps and events, of each the newest LINES_A_LOOK; `byte` says where in its file an event
        begins. A missing file has none, and half a last line is left for the next look, unless this is the last."""
        found, run_dir = self.figures, self._run_dir
        found.config, found.summary = _json(run_dir / CONFIG) or {}, _json(run_dir / SUMMARY)
        if len(found.bounds) < 2:
            found.bounds = [(0, int(found.config.get("max_staleness", 0)))]
        steps = deque((line for line in self._lines(METRICS, is_last) if _add_step(found, line)), LINES_A_LOOK)
        events, begins = deque[Line](maxlen=LINES_A_LOOK), self._read[EVENTS]
        for event in self._lines(EVENTS, is_last):
            _add_event(found, event)
            events.append({**event, "byte": begins})
            begins = self._read[EVENTS]
        return list(steps), list(events)

    def _lines(self, name: str, is_last: bool) -> Iterator[Line]:
        """Every further line that is a JSON object. Counts the others, and notes the times."""
        try:
            file = (self._run_dir / name).open("rb")
        except FileNotFoundError:
            return
        found = self.figures
        with file:
            file.seek(self._read[name])
            while line := file.readline(LINE_BYTES):
                if not (line.endswith(b"\n") or len(line) == LINE_BYTES or is_last):
                    return
                self._read[name] += len(line)
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if not isinstance(value, dict):
                    found.torn += 1
                    continue
                value.pop("command", None)  # As in the event `prepared`: it may hold secrets
                if (time := _number(value.get("time"))) is not None:
                    found.began = time if found.began is None else min(found.began, time)
                    found.ended = time if found.ended is None else max(found.ended, time)
                yield value


def read_figures(run_dir: Path) -> Figures:
    """All figures in `run_dir`; a missing file has none. Reads each file once."""
    files = FigureFiles(run_dir)
    files.look(is_last=True)
    return files.figures


def _add_step(found: Figures, line: Line) -> bool:
    """Return whether the step is new: a resumed run repeats some."""
    step = _number(line.get("step"))
    if step is None or step <= found.steps:
        return False
    found.steps = int(step)
    if (time := _number(line.get("time"))) is not None:
        found.times.add(step, time)
    for name, value in line.items():
        number = _number(value)
        # The events `evaluated` have the held-out figures too, with the version that each is of.
        told_elsewhere = name in ("step", "time") or name.startswith("eval_")
        if number is not None and not told_elsewhere:
            _add(found.columns, name, step, number)
    return True


def _add_event(found: Figures, event: Line) -> None:
    kind, number = str(event.get("kind")), found.kinds.total()
    found.kinds[kind] += 1
    found._ends.add(number, event)
    if kind in MATTER:
        found._that_matter.add(number, event)
    if kind == "prepared":
        found.ran_on = event
    if kind == "evaluated":
        _add_evaluation(found, event)
    step = _number(event.get("step"))
    if kind == "set" and event.get("key") == "max_staleness" and step is not None:
        _add_bound(found, int(step), event)
    if kind in MARKED or kind in PASSING:
        at = found.step_at(_number(event.get("time"))) if step is None else step
        what = f"{event.get('key')}={event.get('after')}" if kind == "set" else event.get("alarm") or event.get("node")
        mark = at, f"{kind} {str(what or '')[:MARK_LENGTH]}".strip()
        found.marked.setdefault(kind, deque(maxlen=MARKS_KEPT)).append(mark)


def _add_bound(found: Figures, step: int, event: Mapping[str, Any]) -> None:
    was = _number(event.get("before"))
    if len(found.bounds) == 1 and was is not None:
        # The configuration is that of the newest life, which may have begun with another S.
        found.bounds[0] = (0, int(was))
    found.bounds.append((step, int(_number(event.get("after")) or 0)))


def _add_evaluation(found: Figures, event: Mapping[str, Any]) -> None:
    version = _number(event.get("version"))
    for name, value in event.items():
        number = _number(value)
        if version is None or number is None or name == "time" or name in NO_FIGURES:
            continue
        _add(found.evaluated, name, version, number)


def _add(columns: dict[str, Column], name: str, step: float, value: float) -> None:
    if name in columns or len(columns) < MAX_NAMES:
        columns.setdefault(name, Column()).add(step, value)


def _json(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
