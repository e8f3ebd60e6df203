"""The benchmark of staleness measures what it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import staleness
from benchmarks.staleness import Row, misses, simulate
from benchmarks.staleness_rules import RULES
from benchmarks.staleness_sim import REPLACED_S, STEP_S

PAIR = Row(case="single", max_staleness=2, broadcast=0.3, generate=0.3)


def rows_of(arguments: str, capsys: pytest.CaptureFixture[str], *, status: int = 0) -> list[dict[str, Any]]:
    assert staleness.main([*arguments.split(), "--json"]) == status
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def test_deadlines_neither_starve_the_learner_nor_discard_as_others_do(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of("--staleness 2 --broadcast 0.3 --steps 80 --cases single", capsys)
    assert row["targeted"]
    assert row["workers"] == 13
    rules = row["rules"]
    assert rules["deadlines, hold"]["discarded"] == 0
    assert rules["deadlines, hold"]["idle"] > 0.1
    assert rules["deadlines"]["idle"] < 0.01
    assert 0 < rules["deadlines"]["discarded"] < 0.05 < rules["counter"]["discarded"] < rules["none"]["discarded"]
    assert all(figures["max_staleness"] <= 2 for figures in rules.values())


def test_what_is_discarded_for_its_length_is_long() -> None:
    run = simulate(PAIR, "deadlines", steps=100, seed=1)
    short, *_, long = staleness.summary([run])["discarded_by_quartile"]
    assert long > 5 * short


def test_a_bound_of_zero_and_a_fleet_that_is_too_slow_have_no_target(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("--staleness 0,2 --broadcast 3 --steps 20 --cases single,serial", capsys)
    assert [row["targeted"] for row in rows] == [False] * 4
    assert rows[0]["rules"]["deadlines"]["discarded"] == 0
    assert rows[0]["rules"]["deadlines"]["max_staleness"] == 0


def test_groups_of_eight_are_trained_on_whole() -> None:
    row = Row(case="groups", max_staleness=4, broadcast=0.3, generate=0.3)
    for rule in RULES:
        run = simulate(row, rule, steps=15, seed=1)
        assert (run.steps, len(run.trained)) == (3, 3 * 32 * 8)


def test_samples_of_the_dead_are_lost_and_generated_again() -> None:
    row = Row(case="dying", max_staleness=2, broadcast=0.3, generate=0.3)
    steps = round(4 * REPLACED_S / STEP_S) + 120
    for rule in RULES:
        run = simulate(row, rule, steps=steps, seed=1)
        assert run.lost > 0
        assert run.idle_share < 0.4
        assert len(run.trained) == steps * 32


def test_a_run_repeats_itself_and_differs_by_seed() -> None:
    first, again, other = (simulate(PAIR, "deadlines", steps=20, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_miss_is_named() -> None:
    rules = {
        "deadlines": {"idle": 0.02, "discarded": 0.05},
        "deadlines, hold": {"idle": 0.3, "discarded": 0.001},
        "counter": {"idle": 0.0, "discarded": 0.12},
    }
    assert misses(PAIR, rules) == ["hold discards", "idle", "discards"]
    assert misses(Row(case="groups", max_staleness=2, broadcast=0.3, generate=0.3), rules) == ["hold discards"]
    assert misses(Row(case="dying", max_staleness=2, broadcast=0.3, generate=0.3), rules) == ["idle", "discards"]


@pytest.mark.parametrize("arguments", ["--cases none", "--steps 0", "--staleness -1", "--broadcast 0"])
def test_bad_input_ends_with_status_2(arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        staleness.main(arguments.split())
    assert ended.value.code == 2
