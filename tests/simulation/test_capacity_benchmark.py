"""The benchmark of capacity measures what it says: predictions against the real rollout plane."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import capacity
from swarm.pay.fleet import Worker
from swarm.pay.model import predict
from swarm.plan.simulate.fixed import run_fixed


def test_predictions_are_compared_and_a_missed_target_is_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_cell = {"STALENESS": (1,), "BROADCAST_STEPS": (0.3,), "RATIOS": (0.7,), "STEPS": 5, "MEAN_POINTS": 0.0}
    for name, value in one_cell.items():
        monkeypatch.setattr(capacity, name, value)
    assert capacity.main(["--json"]) == 1
    *_, told, found = capsys.readouterr().out.splitlines()
    assert "missed" in told
    (cell,) = json.loads(found)["cells"]
    assert cell["error_points"] == pytest.approx(100 * (cell["predicted_idle"] - cell["simulated_idle"]))
    assert json.loads(found).keys() >= {"mean_abs_error_points", "median_abs_error_points", "max_abs_error_points"}


@pytest.mark.long
def test_engines_in_lockstep_and_slow_links_beside_others_are_predicted() -> None:
    """Two versions are held at a time, and groups are shared by engines of both kinds: a third is discarded."""
    demand = replace(capacity.KINDS[2].demand(2), groups_per_step=32)
    workers = [Worker(name=f"l{i}", rollouts_per_s=0.6, samples_at_once=24, lockstep=True) for i in range(7)]
    workers += [Worker(name=f"c{i}", rollouts_per_s=0.4, samples_at_once=16) for i in range(10)]
    install_s = [18.0] * 7 + [90.0] * 10
    told = predict(demand, workers, install_s)
    found = run_fixed(demand, workers, install_s, steps=30, warmup_steps=20, seed=1)
    assert told.idle_share == pytest.approx(found.idle_share, abs=0.06)
