"""The benchmark of costs plans and simulates what it says."""

from __future__ import annotations

import json

import pytest

from benchmarks import cost


@pytest.mark.slow
def test_a_lab_saves_about_what_is_reckoned_by_hand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/capacity.md reckons 35 % against one machine in turn."""
    monkeypatch.setattr(cost, "HOURS", 1.0)
    assert cost.main(["--scenarios", "lab-4b", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["saving"]["colocated"] == pytest.approx([0.35, 0.35], abs=0.03)
    assert row["idle_share"][1] <= cost.MAX_IDLE
