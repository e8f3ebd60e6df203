"""The benchmark of staleness measures what it says."""

from __future__ import annotations

import json

import pytest

from benchmarks import staleness


def test_deadlines_neither_starve_the_learner_nor_discard_as_others_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness, "STEPS", 80)
    status = staleness.main(["--staleness", "2", "--broadcast", "0.3", "--cases", "single", "--json"])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert status == bool(row["missed"])
    assert (row["targeted"], row["workers"]) == (True, 13)
    assert 1 <= row["floor"]["least"] <= row["floor"]["mean_staleness"] < 1.2
    rules = row["rules"]
    assert rules["deadlines, hold"]["discarded"] == 0
    assert rules["deadlines"]["idle"] < 0.01 < 0.1 < rules["deadlines, hold"]["idle"]
    assert 0 < rules["deadlines"]["discarded"] < 0.05 < rules["counter"]["discarded"] < rules["none"]["discarded"]
    assert all(figures["max_staleness"] <= 2 for figures in rules.values())
    short, *_, long = rules["deadlines"]["discarded_by_quartile"]
    assert long > 5 * short
