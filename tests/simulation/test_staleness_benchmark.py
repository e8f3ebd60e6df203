"""The benchmark of staleness measures what it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import staleness
from benchmarks.staleness import Row, misses

PAIR = Row(case="single", max_staleness=2, broadcast=0.3, generate=0.3)


def rows_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    status = staleness.main([*arguments.split(), "--json"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert status == any(row["missed"] for row in found)
    return found


def test_deadlines_neither_starve_the_learner_nor_discard_as_others_do(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of("--staleness 2 --broadcast 0.3 --steps 80 --cases single", capsys)
    assert (row["targeted"], row["workers"]) == (True, 13)
    assert 1 <= row["floor"]["least"] <= row["floor"]["mean_staleness"] < 1.2
    rules = row["rules"]
    assert rules["deadlines, hold"]["discarded"] == 0
    assert rules["deadlines"]["idle"] < 0.01 < 0.1 < rules["deadlines, hold"]["idle"]
    assert 0 < rules["deadlines"]["discarded"] < 0.05 < rules["counter"]["discarded"] < rules["none"]["discarded"]
    assert all(figures["max_staleness"] <= 2 for figures in rules.values())
    short, *_, long = rules["deadlines"]["discarded_by_quartile"]
    assert long > 5 * short


def figures(**changed: dict[str, float]) -> dict[str, Any]:
    """What misses no target, but for what is changed. Spaces in names of rules are underscores."""
    met = {"idle": 0.0, "discarded": 0.0, "mean_staleness": 1.0}
    rules = {rule: dict(met) for rule in ("deadlines", "deadlines, off", "deadlines, hold", "counter")}
    rules["counter"]["discarded"] = 0.3
    for name, values in changed.items():
        rules[name.replace("_", ", ")] |= values
    return rules


def test_every_miss_is_named() -> None:
    dying, groups = (Row(case=case, max_staleness=2, broadcast=0.3, generate=0.3) for case in ("dying", "groups"))
    far, floor = Row(case="dying", max_staleness=8, broadcast=1.0, generate=0.3), {"mean_staleness": 0.9}
    assert misses(PAIR, figures(), floor) == []
    held = figures(deadlines_hold={"discarded": 0.001})
    assert misses(PAIR, held, floor) == misses(groups, held, floor) == ["hold discards"]
    assert misses(dying, held, floor) == []
    waits = figures(deadlines={"idle": 0.011}, deadlines_off={"idle": 0.009})
    assert (misses(PAIR, waits, floor), misses(groups, waits, floor)) == (["idle"], [])
    wasteful = figures(deadlines={"discarded": 0.11}, deadlines_off={"discarded": 0.101})
    assert (misses(dying, wasteful, floor), misses(groups, wasteful, floor)) == (["discards"], [])
    assert misses(far, figures(deadlines={"mean_staleness": 2.51}), None) == ["staleness"]
    more = figures(deadlines={"idle": 0.154, "discarded": 0.161}, deadlines_off={"idle": 0.15, "discarded": 0.15})
    beside = ["staleness beside floor", "idle beside off", "discards beside off"]
    assert misses(groups, more, {"mean_staleness": 0.69}) == beside
    for idle, off, missed in ((0.005, 0.0, []), (0.006, 0.004, ["idle beside off"]), (0.008, 0.005, [])):
        assert misses(PAIR, figures(deadlines={"idle": idle}, deadlines_off={"idle": off}), None) == missed
