"""`echo-node simulate`, as a person runs it: figures, a picture, and one clear line for bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.integration.processes import command

EXAMPLE = Path(__file__).parents[2] / "examples" / "lab-4b.toml"

SHORT = ("--hours", "0.5", "--seed", "3")


def simulate(*arguments: str) -> CompletedProcess[str]:
    return command("simulate", str(EXAMPLE), *arguments)


def figures(*arguments: str) -> dict[str, Any]:
    done = simulate(*SHORT, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_the_same_seed_gives_the_same_figures_in_json() -> None:
    first = figures()
    assert first == figures()
    assert first["scenario"] == "lab-4b"
    assert first["idle_share"] < 0.05
    assert first["cost_per_hour"] > 7.16
    assert first["cost_per_hour_by_class"]["learner"] == pytest.approx(7.16)


@pytest.mark.slow
def test_a_person_reads_the_figures() -> None:
    done = simulate(*SHORT, "--trace")
    assert done.returncode == 0, done.stderr
    assert re.search(r"learner idle +\d", done.stdout)
    assert re.search(r"0:\d\d:\d\d vast-3090-\d is activated", done.stdout)
    assert re.search(r"batch 1 taken after", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--hours", "0"), "--hours 0: from more than 0"),
        (("--hours", "nan"), "--hours nan: from more than 0"),
        (("--activate", "some"), "--activate some: all or cheapest"),
        (("--max-staleness", "2", "--publish-every-steps", "4"), "more than S \\+ 1 = 3"),
        (("--budget-per-hour", "-1"), "--budget-per-hour -1.0: it must be at least 0"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    done = simulate(*arguments)
    assert done.returncode == 2
    assert re.search(line, done.stderr)
    assert len(done.stderr.splitlines()) == 1
