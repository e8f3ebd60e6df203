"""Tests that need programs of the machine's: skipped aloud where these are missing, and failures in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REASON = "chromium is not on the PATH"


@pytest.mark.parametrize(("required", "came_to"), [(False, "1 skipped"), (True, "1 error")])
def test_without_chromium_the_browser_is_skipped_or_where_it_is_required_fails(
    required: bool, came_to: str, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text("from tests.browser.conftest import *\n")
    (tmp_path / "test_it.py").write_text("def test_it(browser): pass\n")
    options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-rs"]
    given = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": str(tmp_path), "ECHO_NODE_PROGRAMS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_it.py")],
        cwd=ROOT,
        env={**os.environ, **given, **({"ECHO_NODE_PROGRAMS": "required"} if required else {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert came_to in done.stdout
    assert REASON in done.stdout


def test_ci_gets_the_programs_and_as_root_requires_them() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for program in ("chromium", "prometheus"):
        assert f"command -v {program} >/dev/null || missing+=({program})" in script
    assert "ECHO_NODE_PROGRAMS=required" in script
    assert script.index('wait "$programs"') < script.index("bin/test --submission")
