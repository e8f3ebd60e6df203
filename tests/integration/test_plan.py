"""`echo-node plan` as a person runs it, on the examples that are shipped and on what cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.processes import command

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "colocated", "async_dc"),
    [
        pytest.param("lab-4b", 0.25, 0.2, marks=pytest.mark.slow),
        # Where answers take several steps it takes pacing some thirty to find how old they have to be.
        pytest.param("published-30b-a3b", 0.25, 0.05, marks=pytest.mark.slow),
        pytest.param("volunteers-8b", 0.25, 0.2, marks=pytest.mark.long),
        pytest.param("volunteers-8b-fp8", 0.25, 0.2, marks=pytest.mark.long),
        # In bf16 few of its machines are worth their price.
        pytest.param("internet-32b", 0.0, -0.2, marks=pytest.mark.long),
        pytest.param("internet-32b-fp8", 0.25, 0.2, marks=pytest.mark.long),
    ],
)
def test_an_example_is_planned(name: str, colocated: float, async_dc: float) -> None:
    done = command("plan", str(EXAMPLES / f"{name}.toml"), "--json")
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
def test_a_narrow_terminal_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    file = tmp_path / "small.toml"
    file.write_text((EXAMPLES / "lab-4b.toml").read_text().replace("S = [2, 3, 6, 11]", "S = [3]"))
    done = command("plan", str(file))
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 60
    assert "…" not in done.stdout
