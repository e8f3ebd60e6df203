"""The live view of a run: a panel at the bottom of a terminal, below the messages. A pipe or a file gets lines alone.

A thread draws, so that a blocked terminal (Ctrl-S, a slow line) does not block the event loop. The cursor waits on the
line below the panel. To draw again, the thread moves it up by the rows that the panel takes and writes over them. It
counts those rows at the present width, since a terminal that became narrower has wrapped the panel's lines. The cursor
is never hidden, so there is nothing to restore at the end.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self

from rich.console import Console

from swarm.report.terminal import live_view, plain_line
from swarm.types import printable

FRAME_S = 0.25  # Between two frames, and the time until a resize is seen
LOOK_S = 0.5  # Between two looks at the status of this process, at least
LOOK_SHARE = 0.01  # Share of the time that making a status may take: with a thousand samplers one takes 8 ms
WIDTH = 78  # Columns of the panel at most: on a terminal that is resized to 80 columns nothing is wrapped
LINES_KEPT = 1000  # Lines that wait for a blocked terminal; beyond that the oldest are lost
CLOSE_S = 1.0  # Longest wait for a blocked terminal at the end


class LiveView:
    """What a person sees of a run. Without a terminal, `update` prints a line every `line_s`, if that is set."""

    def __init__(self, console: Console, *, title: str, line_s: float | None = None) -> None:
        self._file = console.file
        self._title = title
        self.line_s = line_s
        self._lined_at = -math.inf
        self.is_live = console.file.isatty() and not console.is_dumb_terminal
        self._console = console
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._shown: tuple[dict[str, Any] | None, list[float]] = (None, [])
        self._rewards: deque[float] = deque(maxlen=WIDTH)
        self._seen_step = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._draw_until_closed, name="live view", daemon=True)
        self._panel: list[str] = []
        self._panel_width = 0
        self._size = (0, 0)
        self._drawn: object = None

    def __enter__(self) -> Self:
        if self.is_live:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, line: str) -> None:
        if self.is_live and not self._closing.is_set():
            self._lines.append(printable(line))
        else:
            print(printable(line), file=self._file, flush=True)

    def update(self, status: dict[str, Any] | None) -> None:
        """Show this status of a node from now on. While it does not answer (None), its last status stays."""
        if status is None and self._shown[0] is not None:
            return
        metrics = status.get("metrics", {}) if status is not None else {}
        if status is not None and "reward" in metrics and status["step"] > self._seen_step:
            self._seen_step = status["step"]
            self._rewards.append(metrics["reward"])
        # Replaced as a whole, since the thread may be drawing the one before.
        self._shown = (status, list(self._rewards))
        if not self.is_live and self.line_s is not None and time.monotonic() - self._lined_at >= self.line_s:
            self._lined_at = time.monotonic()
            self.say(plain_line(status))

    def close(self) -> None:
        """Leave the last panel where it is; lines are printed below it from now on."""
        if not self._closing.is_set():
            self._closing.set()
            if self.is_live:
                self._thread.join(CLOSE_S)

    # -- the thread ------------------------------------------------------------------------------------------

    def _draw_until_closed(self) -> None:
        try:
            while not self._closing.wait(FRAME_S):
                self._draw()
            self._draw()
        except OSError:
            # The terminal is gone; the run goes on.
            pass

    def _draw(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        size, shown = self._terminal_size(), self._shown
        if not lines and size == self._size and shown is self._drawn:
            return
        up = rows_of(self._panel, self._panel_width, size[0])
        self._size, self._drawn = size, shown
        self._panel_width = min(WIDTH, size[0])
        self._panel = self._rendered(*shown, size)
        self._file.write(redrawn(up, (*lines, *self._panel)))
        self._file.flush()

    def _rendered(self, status: dict[str, Any] | None, rewards: list[float], size: tuple[int, int]) -> list[str]:
        """The panel's lines, each as wide as the panel. One that is too high for the screen is cut before its last."""
        with self._console.capture() as captured:
            panel = live_view(status, rewards, self._panel_width, self._title)
            self._console.print(panel, width=self._panel_width)
        lines = captured.get().splitlines()
        most = max(1, size[1] - 1)
        return lines if len(lines) <= most else [*lines[: most - 1], lines[-1]]

    def _terminal_size(self) -> tuple[int, int]:
        """Columns and lines. What rich says would not change if COLUMNS is set."""
        try:
            found = os.get_terminal_size(self._file.fileno())
        except OSError:
            found = os.terminal_size((0, 0))
        return found.columns or 80, found.lines or 24


async def follow(view: LiveView, status: Callable[[], dict[str, Any] | None]) -> None:
    """Show `status` until this is cancelled: on a terminal as it is now, elsewhere now and then."""
    while view.is_live:
        began = time.monotonic()
        view.update(status())
        await asyncio.sleep(max(LOOK_S, (time.monotonic() - began) / LOOK_SHARE))
    while view.line_s is not None:
        await asyncio.sleep(view.line_s)
        view.update(status())


def rows_of(panel: list[str], panel_width: int, width: int) -> int:
    """Rows of a panel whose lines were drawn `panel_width` wide, on a terminal that is `width` wide now."""
    return len(panel) * -(-panel_width // width)


def redrawn(up: int, lines: Iterable[str]) -> str:
    """Escapes that replace the last `up` rows with `lines`, with the cursor below them before and after."""
    # Not cleared as a whole: some terminals save a screen that is cleared from its first line to their history.
    return "\r" + (f"\x1b[{up}A" if up else "") + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J"
