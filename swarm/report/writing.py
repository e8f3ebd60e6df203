"""Where a report is written: beside its place first, so that who reads it meanwhile sees the one before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from swarm.errors import UserError
from swarm.report.figures import read_figures
from swarm.report.page import MARK, render
from swarm.report.samples import Read, read_journal

REPORT = "report.html"


def write_report(run_dir: Path, to: Path | None, readers: Callable[[], Read]) -> tuple[Path, str]:
    """Write the report of `run_dir` to `to`, by default into the run itself; where it is, and what of the run is
    damaged and missing in it. UserError if it cannot."""
    path = to or run_dir / REPORT
    if path.exists() and not _is_report(path):
        raise UserError(f"{path} is there already and no report: remove it, or name another file with --to")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent} is not a directory: make it, or name another file with --to")
    journal = read_journal(run_dir, readers)
    page = render(read_figures(run_dir), journal, now=time.time())
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path, journal.fault if journal.is_damaged else ""


def _is_report(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return MARK in file.read(200)
    except OSError:
        return False
