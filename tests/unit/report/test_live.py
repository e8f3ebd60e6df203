"""The live view of a run, on a terminal that is resized, on a pipe, and on a terminal that stands still."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable

from rich.console import Console

from swarm.report.live import LINES_KEPT, LiveView
from tests.unit.screen import Screen

PATIENCE_S = 60.0
"""Longest wait for a process that only imports rich, on busy cores."""

PROGRAM = """
import sys
from rich.console import Console
from swarm.report.live import LiveView

with LiveView(Console(), title="echo-node test") as view:
    view.say("a line that was said, and is longer than fifty characters by a few words more")
    for line in sys.stdin:
        view.say(line.strip())
"""


class Terminal:
    """A process on a pseudo-terminal; what it writes goes onto a screen."""

    def __init__(self, *command: str, width: int, height: int = 24) -> None:
        self.screen = Screen(width)
        self._leader, follower = pty.openpty()
        self.resize(width, height)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=follower, stderr=follower, text=True)
        os.close(follower)

    def resize(self, width: int, height: int) -> None:
        if width != self.screen.width:
            self.screen.resize(width)
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def reads_until(self, holds: Callable[[list[str]], bool]) -> list[str]:
        """Follow what is written until the screen is as it should be, between two frames."""
        killer = threading.Timer(PATIENCE_S, self.process.kill)
        killer.start()
        try:
            while not (self.screen.at_rest and holds(self.screen.rows)):
                self.screen.write(os.read(self._leader, 65536).decode())
        finally:
            killer.cancel()
        return [row for row in self.screen.rows if row]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._leader)


def drawn_with(line: str, width: int) -> Callable[[list[str]], bool]:
    """Whether the line is on the screen, and a panel so wide."""
    return lambda rows: line in rows and "╰" + "─" * (width - 2) + "╯" in rows


def test_a_view_on_a_terminal_that_is_resized_is_one_panel_below_its_lines() -> None:
    terminal = Terminal(sys.executable, "-c", PROGRAM, width=100)
    try:
        terminal.reads_until(lambda rows: any(row.startswith("╰") for row in rows))
        for number, (width, height) in enumerate([(60, 24), (50, 20), (120, 40), (80, 24)]):
            terminal.resize(width, height)
            terminal.say(f"line {number}")
            rows = terminal.reads_until(drawn_with(f"line {number}", min(78, width)))
        assert [row[0] for row in rows if row[0] in "╭╰"] == ["╭", "╰"], "\n".join(rows)
        at = rows.index("line 0")
        assert rows[at : at + 4] == [f"line {number}" for number in range(4)]
        assert rows[at + 4].startswith("╭"), "the panel follows the last line"
        assert terminal.process.stdin is not None
        terminal.process.stdin.close()
        assert terminal.process.wait(PATIENCE_S) == 0
        assert terminal.screen.modes == [], "nothing that would have to be put back"
    finally:
        terminal.close()


def test_lines_alone_are_printed_on_a_pipe() -> None:
    file = io.StringIO()
    with LiveView(Console(file=file, force_terminal=True), title="echo-node test") as view:
        view.say("one")
        view.update(None)
    assert file.getvalue() == "one\n"
    with LiveView(Console(file=file), title="echo-node test", line_s=3600.0) as view:
        view.update(None)
        view.update(None)
    assert file.getvalue() == "one\nstarting; waiting for the learner's process to start\n"


def test_a_terminal_that_stands_still_holds_nobody_up() -> None:
    leader, follower = pty.openpty()
    # As Ctrl-S does.
    termios.tcflow(follower, termios.TCOOFF)
    seen = ""
    try:
        with open(follower, "w") as file, LiveView(Console(file=file), title="echo-node test") as view:
            for number in range(2 * LINES_KEPT):
                view.say(f"line {number}")
                view.update(None)
            termios.tcflow(follower, termios.TCOON)
            while f"line {2 * LINES_KEPT - 1}" not in seen or not seen.endswith("\x1b[J"):
                seen += os.read(leader, 65536).decode(errors="replace")
    finally:
        os.close(leader)
    assert seen.count("line ") <= 2 * LINES_KEPT
