"""A run that leaves tests out says how many, and which command runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
def test_quick(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.slow
@pytest.mark.long
def test_long(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one after another", "side by side"])
def test_what_was_left_out_is_said_with_the_command_that_runs_it(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    long\n")
    given = ["-p", "tests.conftest", "--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *given, "-m", "not slow and not long", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: 1 slow tests (bin/test --submission" in done.stdout
    assert "left out: 1 long tests (bin/test --all)" in done.stdout
    assert "1 passed" in done.stdout.splitlines()[-1]
