"""What a whole ring runs side by side: of a ring of swarms one or two tests at a time, and the measured last."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MEASURED, SMALL, SWARMS, unit_of_work

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_ring_of_swarms_is_of_one_process_and_ends_with_what_is_measured(tmp_path: Path) -> None:
    (measured,), small = MEASURED, min(SMALL)
    for ring in (*SWARMS, "unit"):
        (tmp_path / ring).mkdir()
        for file in (measured, small, "test_swarm.py"):
            (tmp_path / ring / file).write_text("def test_one(): pass\ndef test_two(): pass\n")
    options = ["-p", "tests.conftest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    options += ["--import-mode", "importlib", "--numprocesses", "2", "--verbose"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^\[(gw\d)\] .* PASSED \S*/(\w+)/(\w+\.py)::", done.stdout, re.MULTILINE)
    assert len(ran) == 6 * (len(SWARMS) + 1), done.stdout
    for ring in SWARMS:
        swarms = [(worker, file) for worker, of, file in ran if of == ring and file != small]
        assert len({worker for worker, _ in swarms}) == 1
        assert [file for _, file in swarms] == ["test_swarm.py"] * 2 + [measured] * 2


@pytest.mark.parametrize("file", ["unit/test_swarm.py", "simulation/test_plan.py", f"integration/{min(SMALL)}"])
def test_everything_else_goes_where_there_is_room(file: str) -> None:
    nodeid = f"tests/{file}::test_one[a/b::c]"
    assert unit_of_work(nodeid) == nodeid


def test_files_of_the_longest_ring_are_in_two_halves() -> None:
    halves = {
        unit_of_work(f"tests/integration/{file.name}::test")
        for file in (ROOT / "tests/integration").glob("test_*.py")
        if file.name not in SMALL
    }
    assert len(halves) == 2
