"""Runs of pytest within tests: what our own plugins and gates do with a directory of small tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_tests(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run what is in `directory` beside nothing of this tree's, but what `options` and its conftest name."""
    given = ["-c", "/dev/null", "--rootdir", str(directory), "-p", "no:cacheprovider", "-rfEs", *options]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *given, str(directory)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
