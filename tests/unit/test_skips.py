"""A skip that does not say why fails the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    path = directory / "test_it.py"
    path.write_text(f"import unittest\nimport pytest\n{source}\n")
    options = ["-p", "tests.conftest", "-c", "/dev/null", "--rootdir", str(directory), "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SILENT = {
    "call": "def test_it(): pytest.skip()",
    "blank": "def test_it(): pytest.skip('  ')",
    "mark": "@pytest.mark.skip\ndef test_it(): pass",
    "module": "pytest.skip(allow_module_level=True)",
    "fixture": "@pytest.fixture\ndef no(): pytest.skip()\ndef test_it(no): pass",
    "unittest": "def test_it(): raise unittest.SkipTest",
}
SPEAKING = """
def test_call(): pytest.skip("needs root")
@pytest.mark.skip(reason="needs root")
def test_mark(): pass
@pytest.mark.skipif(True, reason="needs root")
def test_if(): pass
@pytest.mark.xfail
def test_expected(): assert False
def test_import(): pytest.importorskip("no_such_module")
"""


@pytest.mark.parametrize("source", SILENT.values(), ids=SILENT)
def test_a_silent_skip_fails(source: str, tmp_path: Path) -> None:
    done = _run(tmp_path, source)
    assert done.returncode != 0
    assert "a skip has to say why" in done.stdout


def test_a_skip_that_says_why_is_one(tmp_path: Path) -> None:
    done = _run(tmp_path, SPEAKING)
    assert done.returncode == 0, done.stdout
    assert "4 skipped, 1 xfailed" in done.stdout
