"""`echo-node simulate`, as a person runs it: figures, a picture, and one clear line for bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.integration.processes import command

EXAMPLE = Path(__file__).parents[2] / "examples" / "lab-4b.toml"

SHORT = ("--hours", "0.5", "--seed", "3")


def simulate(*arguments: str) -> CompletedProcess[str]:
    return command("simulate", str(EXAMPLE), *arguments)


@pytest.mark.slow
def test_a_person_reads_the_figures_and_a_program_has_them_as_json() -> None:
    shown, told = simulate(*SHORT, "--trace"), simulate(*SHORT, "--json")
    assert (shown.returncode, told.returncode, told.stderr) == (0, 0, ""), shown.stderr
    assert re.search(r"learner idle +\d", shown.stdout)
    assert re.search(r"0:\d\d:\d\d vast-3090-\d is activated", shown.stdout)
    assert re.search(r"batch 1 taken after", shown.stdout)
    found = json.loads(told.stdout.splitlines()[-1])
    assert (found["scenario"], found["idle_share"] < 0.05, found["cost_per_hour"] > 7.16) == ("lab-4b", True, True)
    assert found["cost_per_hour_by_class"]["learner"] == pytest.approx(7.16)


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
