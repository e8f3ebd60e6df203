"""The benchmark of selections: that its runs are alike but for what they select, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.frontier import HELD_OUT, main, parse, write_pool
from swarm.tasks.digits import DIGITS


@pytest.mark.parametrize(("pool", "longer"), [(20, 0), (0, 32_000)])
def test_a_share_of_the_pool_can_be_learned(pool: int, longer: int, tmp_path: Path) -> None:
    write_pool(tmp_path / "pool.jsonl", pool, 0.2, seed=1)
    rows = [json.loads(line) for line in (tmp_path / "pool.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert [row["held_out"] for row in rows].count(True) == HELD_OUT
    right = [row for row in rows if "".join(sorted(row["prompt"][:DIGITS])) == row["answer"]]
    assert sum(not row["held_out"] for row in right if len(row["answer"]) == DIGITS) == (pool or 40_000) // 5
    assert sum(len(row["answer"]) > DIGITS for row in rows) == longer


@pytest.mark.long
def test_each_selection_draws_as_much_in_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--seeds", "0", "--pool", "24", "--steps", "2", "--selections", "uniform,frontier", "--every", "1"]
    assert main([*few, "--target", "2", "--json"]) == 0
    *rows, figures = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert [row["selection"] for row in rows] == ["uniform", "frontier"]
    assert rows[0]["curve"][0] == rows[1]["curve"][0], "all begin with the same model"
    assert [[drawn for drawn, _ in row["curve"]] for row in rows] == [[0, 2 * 4 * 8]] * 2
    assert figures["rollouts"] == {"0.2": {"uniform": None, "frontier": None}}, "no accuracy is above 1"


def test_an_endless_set_has_only_so_many_numbers_that_can_be_learned() -> None:
    assert parse(["--pool", "0"]).solvable == [0.2]
    with pytest.raises(SystemExit):
        parse(["--pool", "0", "--solvable", "1"])


def test_a_file_says_itself_what_is_trained_on() -> None:
    given = ["--config", "examples/smollm2.toml"]
    assert parse([*given, "--model", "there"]).solvable == [1.0]
    for wrong in ([*given, "--groups", "8"], ["--model", "there"]):
        with pytest.raises(SystemExit):
            parse(wrong)
