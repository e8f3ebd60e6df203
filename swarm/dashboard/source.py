"""What the page shows of a run: of one that this process leads, its node's status beside its files; of any other its
files alone. Nothing is read or reckoned while nobody looks.

The files are read in a thread. The node's status is made on its event loop, once a second at most and more rarely where
that would take more than LOOK_SHARE of the loop's time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from swarm.dashboard.digest import digest
from swarm.dashboard.feed import Feed
from swarm.node.metrics import EVENTS
from swarm.process import in_thread
from swarm.report.figures import LINE_BYTES, LINES_A_LOOK, Column, FigureFiles, Figures, Line
from swarm.report.live import LOOK_SHARE
from swarm.report.page import shown_config
from swarm.report.samples import Read
from swarm.rollout.changes import Changes

LOOK_S = 1.0  # Between two looks: figures change once a step
EVENTS_SHOWN = 200  # Newest events in a snapshot; older ones are asked for
FORGET_S = 60.0  # The figures stay in memory for this long after the last reader, who may only have lost the connection

_ENCODER = msgspec.json.Encoder(enc_hook=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run. `status`, `change` and `timeline` are those of its node, if this process leads it; `status` returns None
    until the node is up."""

    directory: Path
    readers: Callable[[], Read]
    status: Callable[[], Mapping[str, Any] | None] | None = None
    change: Callable[[dict[str, Any]], Awaitable[str]] | None = None


class Source:
    """Publishes to `feed` what is new in `run`, for as long as `watch` runs. `changes` tells of each message."""

    def __init__(self, run: Run, feed: Feed) -> None:
        self.run = run
        self.changes = Changes()
        self._feed = feed
        # Held from a look to its last message, so that a snapshot has exactly what the messages before it say.
        self._lock = asyncio.Lock()
        self._files: FigureFiles | None = None
        self._digest = b"{}"
        self._made: tuple[int, bytes] | None = None
        self._pause_s = LOOK_S
        self._seen_at = 0.0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            if self._feed.readers:
                self._seen_at = time.monotonic()
            if self._files is not None and time.monotonic() - self._seen_at < FORGET_S:
                await self.look()
            elif self._files is not None:
                self._files, self._made = None, None
                self._feed.forget()

    async def look(self) -> None:
        """Publish what is new, if anybody looks."""
        async with self._lock:
            if self._files is not None:
                self._publish(*await in_thread(self._files.look))
        self.changes.tell()

    async def snapshot(self) -> tuple[int, bytes]:
        """Return everything that the page shows at first, as JSON, and the number of the last message that it has."""
        async with self._lock:
            if self._files is None:
                self._files, self._seen_at = FigureFiles(self.run.directory), time.monotonic()
                await in_thread(self._files.look)
                self._look_at_status()
                self._feed.forget()
            if self._made is None or self._made[0] != self._feed.newest:
                number = self._feed.newest
                self._made = number, await in_thread(partial(self._snapshot, self._files.figures))
            return self._made

    def _publish(self, steps: Sequence[Line], events: Sequence[Line]) -> None:
        if max(len(steps), len(events)) >= LINES_A_LOOK:
            self._feed.forget()
        elif steps:
            self._feed.publish("steps", encode([numbers(line) for line in steps]))
        if events and len(events) < LINES_A_LOOK:
            self._feed.publish("events", encode(events))
        if self.run.status is not None or steps or events:
            self._look_at_status()
            self._feed.publish("digest", self._digest)

    def _look_at_status(self) -> None:
        began = time.monotonic()
        assert self._files is not None
        found = self._files.figures
        if self.run.status is None:
            status = found.summary or {"state": found.state}
        else:
            status = self.run.status() or {"state": "starting"}
        self._digest = encode(digest(status, found, now=time.time()))
        self._pause_s = max(LOOK_S, (time.monotonic() - began) / LOOK_SHARE)

    def _snapshot(self, found: Figures) -> bytes:
        """In a thread: some hundred thousand numbers, encoded curve by curve so that others get their turn between."""
        events, before = older_events(self.run.directory, None, EVENTS_SHOWN)
        return encode(
            {
                "boot": self._feed.boot,
                "live": self.run.status is not None,
                "name": self.run.directory.absolute().name,
                "digest": msgspec.Raw(self._digest),
                "config": shown_config(found.config),
                "columns": curves(found.columns),
                "evaluated": curves(found.evaluated),
                "times": curve(found.times),
                "marks": [{"step": step, "kind": text.partition(" ")[0], "text": text} for step, text in found.marks],
                "bounds": found.bounds,
                "events": events,
                "events_before": before,
                "event_counts": found.kinds,
            }
        )


def encode(value: Any) -> bytes:
    """JSON in one line; what is no number becomes null, and what JSON has no word for its text."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        # Half a surrogate pair, which only a strange line of a file can have.
        text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace")
        return _ENCODER.encode(json.loads(text))


def numbers(line: Line) -> dict[str, Any]:
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def curves(columns: Mapping[str, Column]) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(encode(curve(column))) for name, column in columns.items()}


def curve(column: Column) -> dict[str, list[float]]:
    points = column.points()
    return {
        "x": [point.step for point in points],
        "mean": [point.mean for point in points],
        "low": [point.low for point in points],
        "high": [point.high for point in points],
    }


def older_events(run_dir: Path, before: int | None, count: int) -> tuple[list[Line], int | None]:
    """Return the last `count` events that end at byte `before` of the file (None: its end), oldest first, and the byte
    at which they begin, if there are older ones. Blocking."""
    try:
        with (run_dir / EVENTS).open("rb") as file:
            end = min(before, file.seek(0, 2)) if before is not None else file.seek(0, 2)
            begin = max(0, end - LINE_BYTES)
            file.seek(begin)
            lines = file.read(end - begin).splitlines(keepends=True)
    except FileNotFoundError:
        return [], None
    if lines and not lines[-1].endswith(b"\n"):
        end -= len(lines.pop())
    if begin and lines:
        del lines[0]
    taken: deque[bytes] = deque(lines, maxlen=count)
    place = end - sum(map(len, taken))
    found = []
    for line in taken:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [one for one in found if isinstance(one, dict)], place if 0 < place < end else None
