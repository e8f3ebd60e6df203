"""A check of a GPU: a benchmark in a process of its own, and what its figures may be.

A process that dies, hangs, says nothing or misses a limit takes no other check with it: its whole group is killed when
it ends or its time is up, and what it wrote last is kept. Nothing is imported here but what every machine has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

Outcome = Literal["met", "missed", "failed", "skipped"]
SAID = 400  # Last characters of what a failed check said, in its line
KEPT = 8000  # The same in the file of figures: a lent machine is gone afterwards, with its logs
DRY_FACTOR = 5.0  # A CPU that others use too is slower than the card that a share is meant for
MIN_S = 15.0  # Loading torch and making a model takes longer: a check with less time left is not begun
OUT_OF_TIME = "out of time"
MISSED = (0, 1)  # A benchmark's statuses when it has figures; with 1 they missed a target of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Figures of a check by their path, and what they may be: anything, if they are only to be shown. `*` in a path is
    each of a list. What holds `everywhere` is of no device's speed or memory."""

    path: str
    least: float = float("-inf")
    most: float = float("inf")
    everywhere: bool = False

    def found(self, figures: Any) -> list[float]:
        places: list[Any] = [figures]
        for part in self.path.split("."):
            places = [one for place in places for one in (place if part == "*" else [place[part]])]
        return [float(one) for one in places]

    def line(self, figures: Any) -> str:
        values = ", ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in self.found(figures))
        missed = "" if self.is_met(figures) else ": missed"
        bounds = [f"at least {self.least:g}"] * (self.least > float("-inf"))
        bounds += [f"at most {self.most:g}"] * (self.most < float("inf"))
        return f"{self.path.rpartition('.')[2]} {values}" + (f" ({' and '.join(bounds)})" if bounds else "") + missed

    def is_met(self, figures: Any) -> bool:
        """What is not a number keeps to no limit."""
        found = self.found(figures)
        return bool(found) and all(self.least <= value <= self.most for value in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`command`, a module and its arguments, runs on a GPU; `dry` in its place on the CPU. Both end with a line of
    JSON. Of all the time it has `limit_s`. `packages` have to be importable for either. `needs` says why the GPU's
    cannot run here, or ""."""

    name: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    limits: tuple[Limit, ...]
    limit_s: float
    packages: tuple[str, ...] = ()
    needs: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`line` is for people; `said` is the end of what a check wrote that failed."""

    name: str
    outcome: Outcome
    seconds: float
    line: str
    figures: Mapping[str, Any]
    said: str = ""


def why_not(check: Check, *, dry: bool) -> str:
    """Say why the check cannot run on this machine, or ""."""
    lacking = [name for name in check.packages if find_spec(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    return "" if dry else check.needs()


def run(check: Check, *, dry: bool, left_s: float = float("inf")) -> Result:
    """Run one check within its share of the time, or within what is left of all of it."""
    why = why_not(check, dry=dry) or (OUT_OF_TIME if left_s < MIN_S else "")
    if why:
        return Result(name=check.name, outcome="skipped", seconds=0.0, line=why, figures={})
    module, *arguments = check.dry if dry else check.command
    share_s = check.limit_s * (DRY_FACTOR if dry else 1.0)
    began = time.monotonic()
    status, answer, said = _ended([sys.executable, "-m", module, *arguments], min(share_s, left_s))
    seconds = time.monotonic() - began
    if status is None:
        # One that was not given its share has not shown anything.
        outcome: Outcome = "failed" if left_s >= share_s else "skipped"
        line = f"took longer than {share_s:.0f} s" if outcome == "failed" else f"{OUT_OF_TIME} after {seconds:.0f} s"
        return Result(name=check.name, outcome=outcome, seconds=seconds, line=line, figures={}, said=said)
    figures = _figures(answer) if status in MISSED else None
    if figures is None:
        line = f"ended with status {status}: {' '.join(said.split())[-SAID:] or 'it said nothing'}"
        return Result(name=check.name, outcome="failed", seconds=seconds, line=line, figures={}, said=said)
    return judged(check, figures, seconds, dry=dry)


def _ended(command: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
    """Run a command: its status, None if it had to be killed; its standard output; and the end of all that it wrote.

    Output goes to files, because a process that the command leaves behind would keep a pipe open."""
    with TemporaryDirectory(prefix="echo-node-gpu-check-") as directory:
        out, err = Path(directory) / "out", Path(directory) / "err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also what a command has left behind that ended: it would keep memory of the card.
            for group in (process.pid, *_groups_under(process.pid)):
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            process.wait()
        answer = out.read_text(errors="replace")
        return status, answer, (answer + err.read_text(errors="replace"))[-KEPT:]


def _groups_under(pid: int) -> set[int]:
    """The groups of a running command's processes: an engine leads one, and takes half a minute to see that nobody
    needs it while it starts. None if psutil is not here; no engine runs without."""
    try:
        import psutil
    except ImportError:
        return set()
    found = set()
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(ProcessLookupError):
                found.add(os.getpgid(child.pid))
    return found


def _figures(answer: str) -> dict[str, Any] | None:
    """The JSON object in the last line, or None."""
    try:
        found = json.loads(answer.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def judged(check: Check, figures: Mapping[str, Any], seconds: float, *, dry: bool) -> Result:
    """A dry run is held to what holds everywhere. Of other limits there have to be figures: those of a toy on a CPU say
    nothing."""
    try:
        is_met = all(limit.is_met(figures) or (dry and not limit.everywhere) for limit in check.limits)
        line = "; ".join(limit.line(figures) for limit in check.limits)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"its figures lack {error}"
        return Result(name=check.name, outcome="failed", seconds=seconds, line=missing, figures=figures)
    if dry and is_met:
        line = "it runs"
    return Result(name=check.name, outcome="met" if is_met else "missed", seconds=seconds, line=line, figures=figures)
