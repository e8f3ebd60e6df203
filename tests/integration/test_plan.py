"""`echo-node plan` as a person runs it, on the examples that are shipped and on what cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_plan(file: Path, *flags: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarm", "plan", str(file), *flags],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": str(EXAMPLES.parent), "COLUMNS": str(columns), "PATH": ""},
    )


def refused(file: Path) -> str:
    done = run_plan(file)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("echo-node: ")
    return done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "colocated", "async_dc"),
    [
        pytest.param("lab-4b", 0.25, 0.2, marks=pytest.mark.slow),
        pytest.param("volunteers-8b", 0.25, 0.2, marks=pytest.mark.long),
        pytest.param("volunteers-8b-fp8", 0.25, 0.2, marks=pytest.mark.long),
        # In bf16 few of its machines are worth their price.
        pytest.param("internet-32b", 0.0, -0.2, marks=pytest.mark.long),
        pytest.param("internet-32b-fp8", 0.25, 0.2, marks=pytest.mark.long),
    ],
)
def test_an_example_is_planned(name: str, colocated: float, async_dc: float) -> None:
    done = run_plan(EXAMPLES / f"{name}.toml", "--json")
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    found = json.loads(last)
    assert "prices in USD as of 2026-11" in " ".join(done.stdout.split())
    assert found["feasible"]
    assert found["idle_share"] <= 0.02
    assert found["saving"]["colocated"] > colocated
    assert found["saving"]["async_dc"] > async_dc
    text = "\n".join(shown)
    assert f"--max-staleness {found['max_staleness']}" in text
    assert all(one["name"] in text for one in found["classes"])


@pytest.mark.long
def test_a_narrow_terminal_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text((EXAMPLES / "lab-4b.toml").read_text().replace("S = [2, 3, 6, 11]", "S = [3]"))
    done = run_plan(file, columns=60)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 60
    assert "…" not in done.stdout


def test_what_no_bound_admits_is_refused_with_the_inequality(tmp_path: Path) -> None:
    file = tmp_path / "strict.toml"
    file.write_text((EXAMPLES / "lab-4b.toml").read_text().replace("S = [2, 3, 6, 11]", "S = [0]"))
    line = refused(file)
    assert "broadcast_s + generation_s < (max_staleness + 1 - publish_every_steps) * train_step_s fails" in line


def test_a_bad_price_is_refused_by_key_and_class(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text((EXAMPLES / "lab-4b.toml").read_text().replace("price_per_h = 0.40 ", "price_per_h = nan "))
    line = file.read_text()[: file.read_text().index("price_per_h = nan")].count("\n") + 1
    assert f"{file}, line {line}: fleet vast-4090: price_per_h = nan" in refused(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.toml")


def test_the_command_imports_no_torch() -> None:
    program = (
        "import sys, swarm.cli.run, swarm.plan.plan, swarm.pay.delivery, swarm.report.plans;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert done.stdout.strip() == "False"
