"""What the page shows of a run: of one that this process leads its node's status and its files, of any other its files
alone. Nothing is read or computed while no page is open.

Files are read in a thread. The node's status is made on its event loop, once a second at most, and more rarely where it
would take more than LOOK_SHARE of the loop's time.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from swarm.aio import Changes, in_thread
from swarm.dashboard.digest import digest
from swarm.dashboard.feed import PageFeed
from swarm.report.figures import LINES_A_LOOK, MARKED, PASSING, Column, FigureFiles, Figures, Line
from swarm.report.live import LOOK_SHARE
from swarm.run.directory import TIMELINE
from swarm.run.log import EVENTS
from swarm.run.timeline import Timeline
from swarm.tasks.base import Read

LOOK_S = 1.0  # Between two looks: figures change once a step
EVENTS_SHOWN = 200  # Newest events in a snapshot; older ones are asked for
OLDER_BYTES = 1 << 18  # Of events, read for one such question: four times what 200 usual ones take
FORGET_S = 60.0  # Figures stay in memory for this long after the last reader, who may only have lost the connection
STARTING = {"state": "starting"}
SOON = 2.0**53  # Of what is numbered, more than there is
SECRETS = ("token", "password", "secret")  # Settings with these in their names are not shown

_ENCODER = msgspec.json.Encoder(enc_hook=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """A run. The last three are those of its node, if this process leads it; `status` is None until the node is up."""

    directory: Path
    readers: Callable[[], Read]
    status: Callable[[], Mapping[str, Any] | None] | None = None
    change: Callable[[dict[str, Any]], Awaitable[str]] | None = None
    timeline: Callable[[], Timeline] | None = None


class Source:
    """Publishes to `feed` what is new in `run`, for as long as `watch` runs. `changes` tells of each message."""

    def __init__(self, run: ShownRun, feed: PageFeed) -> None:
        self.changes = Changes()
        self._run = run
        self._feed = feed
        # Held from a look to its last message, so that a snapshot has exactly what the messages before it say.
        self._lock = asyncio.Lock()
        self._files: FigureFiles | None = None
        self._recent: deque[Line] = deque(maxlen=EVENTS_SHOWN)
        self._digest = b"{}"
        self._made: tuple[int, bytes] = (-1, b"")
        self._making: asyncio.Task[tuple[int, bytes]] | None = None
        self._pause_s = LOOK_S
        self._seen_at = 0.0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            if self._feed.readers:
                self._seen_at = time.monotonic()
            if time.monotonic() - self._seen_at < FORGET_S:
                await self.look()
            elif self._files is not None:
                async with self._lock:
                    self._files, self._made = None, (-1, b"")
                    self._feed.forget()

    async def look(self) -> None:
        """Publish what is new, if anybody looks."""
        try:
            await self._look()
        except OSError:
            pass  # A disk that is away for a moment, or files without permission: looked at again.
        except Exception as error:  # noqa: BLE001 - A page that stands still without a word would be believed
            fault = f"the page cannot show what is new: {error!r}; please report it"
            self._feed.publish("digest", encode({**json.loads(self._digest), "fault": fault}))
            self.changes.tell()

    async def _look(self) -> None:
        async with self._lock:
            if self._files is None:
                return
            before = self._feed.newest
            steps, events = await in_thread(self._files.look)
            self._recent.extend(events)
            if max(len(steps), len(events)) == LINES_A_LOOK:
                self._feed.forget()
            elif steps:
                self._feed.publish("steps", encode([numbers(line) for line in steps]))
            if 0 < len(events) < LINES_A_LOOK:
                self._feed.publish("events", encode(events))
            if self._run.status is not None or steps or events:
                self._reckon(self._files)
                self._feed.publish("digest", self._digest)
        if self._feed.newest != before:
            self.changes.tell()

    async def snapshot(self) -> tuple[int, bytes]:
        """Return the number of the last message, and what the page shows with all of them, as JSON."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        # A reader that gives up leaves the work running: the next one would only begin the same again.
        return await asyncio.shield(self._making)

    async def _make(self) -> tuple[int, bytes]:
        async with self._lock:
            if (files := self._files) is None:
                files, self._seen_at = FigureFiles(self._run.directory), time.monotonic()
                self._recent.clear()
                self._recent.extend((await in_thread(files.look))[1])
                self._reckon(files)
                self._feed.forget()
                self._files = files
            if self._made[0] != self._feed.newest:
                name, live = self._run.directory.absolute().name, self._run.status is not None
                known = files, self._digest, list(self._recent)
                work = partial(snapshot_of, *known, name=name, boot=self._feed.boot, live=live)
                self._made = self._feed.newest, await in_thread(work)
            return self._made

    def _reckon(self, files: FigureFiles) -> None:
        began, found = time.monotonic(), files.figures
        status = self._run.status() or STARTING if self._run.status else found.summary or last_status(found)
        live = self._run.status is not None
        now = time.time() if live else found.ended or found.began or 0.0
        self._digest = encode(digest(status, found.config, began=found.began, now=now, live=live))
        self._pause_s = max(LOOK_S, (time.monotonic() - began) / LOOK_SHARE)


def snapshot_of(
    files: FigureFiles, shown: bytes, events: Sequence[Line], *, name: str, boot: str = "", live: bool = False
) -> bytes:
    """Return all that a page shows of a run at first, as JSON. `shown` is its digest, encoded."""
    found = files.figures
    marks = found.marks((*MARKED, *PASSING))
    return encode(
        {
            "boot": boot,
            "live": live,
            "name": name,
            "digest": msgspec.Raw(shown),
            "config": shown_config(found.config),
            "torn": found.torn,
            **curves(files),
            "marks": [{"step": step, "kind": text.partition(" ")[0], "text": text} for step, text in marks],
            "bounds": found.bounds,
            "events": events,
            "event_counts": found.kinds,
        }
    )


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with "not shown" in place of secrets."""
    return {
        name: "not shown" if any(part in name.lower().split("_") for part in SECRETS) else value
        for name, value in config.items()
    }


def last_status(found: Figures) -> dict[str, Any]:
    """Return what the files of a run that ended without a summary say, in a status's words."""
    metrics, measured = ({name: one.last for name, one in some.items()} for some in (found.columns, found.evaluated))
    of = {"step": found.steps, "steps": found.config.get("steps"), "max_staleness": found.bound}
    return {"state": found.state, **of, "metrics": metrics, "held_out": [measured] if measured else []}


def curves(files: FigureFiles) -> dict[str, Any]:
    """Return the run's curves. They are encoded one by one, so that the event loop gets its turn between them."""
    found = files.figures
    return {
        "columns": {name: _curve(column) for name, column in found.columns.items()},
        "evaluated": {name: _curve(column) for name, column in found.evaluated.items()},
        "times": _curve(found.times),
    }


def _curve(column: Column) -> msgspec.Raw:
    points = column.points()
    named = {name: [getattr(point, name) for point in points] for name in ("mean", "low", "high")}
    return msgspec.Raw(encode({"x": [point.step for point in points], **named}))


def numbers(line: Line) -> dict[str, Any]:
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def encode(value: Any) -> bytes:
    """Return JSON in one line. What is no number becomes null, and what JSON has no form for its text."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        # Half a surrogate pair, which only a strange line of a file can have.
        return _ENCODER.encode(json.loads(json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace")))


def older_events(run_dir: Path, before: int, count: int) -> dict[str, Any]:
    """Return the last `count` events before byte `before` of their file, oldest first, and the byte where they begin.
    Blocking. Reads OLDER_BYTES at most, so there may be fewer events, and more before them."""
    try:
        with (run_dir / EVENTS).open("rb") as file:
            before = min(before, file.seek(0, os.SEEK_END))
            begins = file.seek(max(0, before - OLDER_BYTES))
            lines = file.read(before - begins).splitlines(keepends=True)
    except FileNotFoundError:
        return {"events": [], "next": None}
    # The first may have lost its beginning. Of one that is longer than all that is read nothing is shown.
    lines = lines[max(begins > 0, len(lines) - count) :]
    events = []
    for line in lines:
        with suppress(ValueError):  # Torn by a crash
            event = json.loads(line)
            if isinstance(event, dict):
                event.pop("command", None)  # As in the event `prepared`: it may hold secrets
            events.append(event)
    return {"events": events, "next": (before - sum(map(len, lines)) if lines else begins) or None}


def kept_timeline(run_dir: Path) -> tuple[Timeline, float]:
    """Return what the run's file says of its timeline, and when it was written. Blocking."""
    path = run_dir / TIMELINE
    try:
        return Timeline.of(json.loads(path.read_text())), path.stat().st_mtime
    except (OSError, ValueError):
        return Timeline(time.time()), time.time()
