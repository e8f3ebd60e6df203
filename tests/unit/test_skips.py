"""A skip that does not say why fails the run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(directory: Path, sources: dict[str, str], *options: str) -> str:
    """What a run of one file for each source prints."""
    for name, source in sources.items():
        (directory / f"test_{name}.py").write_text(f"import unittest\nimport pytest\n{source}\n")
    given = ["-p", "tests.conftest", "-c", "/dev/null", "--rootdir", str(directory), "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--continue-on-collection-errors", *given, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return done.stdout


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadgroup")], ids=["one after another", "side by side"])
def test_a_silent_skip_fails_and_one_that_says_why_is_one(options: tuple[str, ...], tmp_path: Path) -> None:
    said = _run(tmp_path, {**SILENT, "speaking": SPEAKING}, *options)
    failed = re.findall(r"^(?:FAILED|ERROR) .*test_(\w+)\.py", said, re.MULTILINE)
    assert sorted(failed) == sorted(SILENT), said
    assert said.count("a skip has to say why") >= len(SILENT)
    assert ", 4 skipped, 1 xfailed" in said.splitlines()[-1]
