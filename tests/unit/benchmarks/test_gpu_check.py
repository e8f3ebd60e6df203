"""The check of a GPU: what it makes of figures, of processes that go wrong, and of the time that it has."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Check, Limit, judged, run

RATIOS = (Limit(path="memory.*.estimate_ratio", least=0.85, most=1.15),)


def check_of(*command: str, name: str = "one", limits: tuple[Limit, ...] = (), **others: Any) -> Check:
    return Check(name=name, command=command, dry=command, limits=limits, **{"limit_s": 120.0, **others})


class Scripts:
    """Modules for checks to run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check(self, source: str, *, name: str = "one", limits: tuple[Limit, ...] = (), **others: Any) -> Check:
        (self.directory / f"check_{name}.py").write_text(source)
        return check_of(f"check_{name}", name=name, limits=limits, **others)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Scripts(tmp_path)


@pytest.mark.parametrize(
    ("ratios", "outcome"), [((0.86, 1.14), "met"), ((1.0, 1.2), "missed"), ((0.8, math.nan), "missed")]
)
def test_each_of_several_figures_has_to_keep_to_a_limit(ratios: tuple[float, ...], outcome: str) -> None:
    figures = {"memory": [{"estimate_ratio": ratio} for ratio in ratios]}
    found = judged(check_of(limits=RATIOS), figures, 1.0, dry=False)
    assert found.outcome == outcome
    assert found.line.startswith(f"estimate_ratio {ratios[0]:.3g}, {ratios[1]:.3g} (at least 0.85 and at most 1.15)")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("raise SystemExit('no room')", "ended with status 1: no room"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9: it said nothing"),
        ("import sys; print('{}'); print('late'); print('loud', file=sys.stderr)", "ended with status 0: {} late loud"),
    ],
)
def test_what_ends_without_figures_has_failed_and_is_quoted(scripts: Scripts, source: str, line: str) -> None:
    found = run(scripts.check(source), dry=False)
    assert (found.outcome, found.line) == ("failed", line)


def test_a_missed_target_of_its_own_has_figures(scripts: Scripts) -> None:
    limits = (Limit(path="kl", most=1),)
    found = run(scripts.check("""import sys; print('{"kl": 2}'); sys.exit(1)""", limits=limits), dry=False)
    assert (found.outcome, found.line, found.figures) == ("missed", "kl 2 (at most 1): missed", {"kl": 2})


def test_what_was_not_given_its_share_is_out_of_time(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "MIN_S", 0.0)
    found = run(scripts.check("import time; time.sleep(3600)", limit_s=100.0), dry=False, left_s=0.2)
    assert (found.outcome, found.line) == ("skipped", "out of time after 0 s")


def test_an_engine_of_a_check_that_is_killed_goes_with_it(scripts: Scripts, tmp_path: Path) -> None:
    """It is a session of its own, as a node starts it."""
    noted = tmp_path / "pid"
    started = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], start_new_session=True)"
    source = (
        f"import pathlib, subprocess, sys; p = {started}; pathlib.Path({str(noted)!r}).write_text(str(p.pid)); p.wait()"
    )
    check, limit_s = scripts.check(source), 0.5
    # On a busy machine it may have been killed before.
    while not noted.exists():
        assert run(replace(check, limit_s=limit_s), dry=False).line.startswith("took longer")
        limit_s *= 2
    died(int(noted.read_text()))


def died(pid: int) -> None:
    """Dying takes a moment, and where nobody reaps orphans it stays a zombie. Else the test's own limit ends this."""
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def dry_run(checks: list[Check], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(gpu_check, "CHECKS", tuple(checks))
    return gpu_check.main(["--dry-run", *arguments])


def test_figures_are_written_after_each_check_and_none_takes_another_with_it(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    reads = f"import json; print(json.dumps({{'before': len(json.load(open({str(out)!r}))['checks'])}}))"
    checks = [scripts.check("raise ValueError('broken')", name="dies"), scripts.check(reads, name="reads")]
    assert dry_run(checks, monkeypatch, "--out", str(out)) == 1
    written = json.loads(out.read_text())["checks"]
    assert [(one["name"], one["outcome"]) for one in written] == [("dies", "failed"), ("reads", "met")]
    assert written[1]["figures"] == {"before": 1}
    assert "1 failed" in capsys.readouterr().out.splitlines()[-1]
    assert dry_run(checks, monkeypatch, "--only", "reads", "--out", str(out)) == 0
