"""What a node said, in node.log in a state directory, for `echo-node logs`, which shows it next to the engine's log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

NAME, ENGINE_NAME = "node.log", "engine.log"
LOG_BYTES = 1 << 20  # Beyond this a log becomes the older one, which is lost: months of what a node says
TAIL_BYTES, TAIL_LINES = 65_536, 20  # What `logs` shows of each log at first


class SaidLog:
    """Passes lines on to `say`, and keeps them with their times once the directory is known."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._to_terminal = say
        self._early: list[str] = []
        self._path: Path | None = None

    def open(self, directory: Path) -> None:
        self._path = directory / NAME
        for line in self._early:
            self._keep(self._path, line)

    def say(self, line: str) -> None:
        self._to_terminal(line)
        self.keep(line)

    def keep(self, line: str) -> str:
        """Keep a line that the terminal gets by another way, and return it."""
        stamped = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}"
        if self._path is None:
            self._early.append(stamped)
        else:
            self._keep(self._path, stamped)
        return line

    def _keep(self, path: Path, line: str) -> None:
        try:
            with open(path, "a", opener=partial(os.open, mode=0o600)) as file:
                is_full = file.tell() > LOG_BYTES
                file.write(line + "\n")
            if is_full:
                path.replace(path.with_suffix(".log.old"))
        except OSError:
            pass  # A full disk ends no node, and the terminal has the line


def follow(directory: Path) -> Iterator[str | None]:
    """Yield the last lines of a node's logs, then None, and from then on what is added, with a None after each look.
    Lines of the engine's log are marked. Blocking."""
    marks, ends = {NAME: "", ENGINE_NAME: "engine | "}, dict.fromkeys((NAME, ENGINE_NAME), -1)
    while True:
        for name, mark in marks.items():
            try:
                lines, ends[name] = _read(directory / name, ends[name])
            except FileNotFoundError:
                continue
            yield from (mark + line for line in lines)
        yield None


def _read(path: Path, end: int) -> tuple[list[str], int]:
    """Return the whole lines after byte `end`, at first the last ones, and where they end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # A log that is shorter than before was begun again.
        file.seek(max(0, size - TAIL_BYTES) if end < 0 else end if end <= size else 0)
        start = file.tell()
        data = file.read(size - start)
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.decode(errors="replace").splitlines()
    return lines[-TAIL_LINES:] if end < 0 else lines, start + len(whole)
