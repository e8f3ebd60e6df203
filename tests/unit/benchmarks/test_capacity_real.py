"""The real points of the capacity benchmark: what is made of what a swarm says. No swarm."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.capacity_real import Pace, Point, found_of, measured_of, summary


def rows(count: int, *, period_s: float, idle_share: float) -> list[dict[str, Any]]:
    same = {"idle_share": idle_share, "train_step_s": 2.0, "predicted_idle_share": 0.2}
    return [{"time": 100 + n * period_s, **same} for n in range(count)]


def said(*rates: float, install_s: float = 0.8) -> dict[str, Any]:
    same = {"samples_at_once": 8, "lockstep": True, "install_s": install_s}
    nodes = {f"n{number}": {"rollouts_per_s": rate, **same} for number, rate in enumerate(rates)}
    return {"train_step_s": 9.9, "lengths": [10.0], "by_node": nodes}


def test_the_idle_share_is_of_all_the_time_and_inputs_are_medians() -> None:
    steady = rows(3, period_s=2.5, idle_share=0.2)
    uneven = [*steady, {**steady[-1], "time": steady[-1]["time"] + 5.0, "idle_share": 0.6}]
    measured = measured_of(uneven, [said(4.0, 3.0), said(4.0, 3.0, install_s=0.6), said(5.0, 3.0)], 2)
    # The first row only says when the others begin: 2.5 + 2.5 + 5 s, of which 0.5 + 0.5 + 3 were waited.
    assert measured.steps == 3
    assert measured.idle_share == pytest.approx(0.4)
    assert measured.demand.train_step_s == pytest.approx(2.0)
    assert [worker.rollouts_per_s for worker in measured.workers] == [4.0, 3.0]
    assert measured.install_s == (0.8, 0.8)


def test_a_fleet_that_is_too_slow_is_predicted_and_compared() -> None:
    """32 rollouts at 8 a second take 4 s, of which 2 s are training."""
    point, pace = (
        Point(max_staleness=2, broadcast_steps=0.4, ratio=0.7),
        Pace(unit="R/T", tokens_per_s=10.0, max_upload_mbit=1.0),
    )
    measured = measured_of(rows(5, period_s=4.0, idle_share=0.5), [said(4.0, 4.0)], 2)
    right, wrong = (found_of(point, pace, one) for one in (measured, replace(measured, idle_share=0.3)))
    assert right["predicted"]["idle_share"] == pytest.approx(0.5, abs=0.01)
    assert wrong["error_points"] == pytest.approx(20, abs=1)
    whole = summary([right, wrong])
    assert (summary([right])["real_met"], whole["real_met"]) == (True, False)
    assert json.loads(json.dumps(whole, allow_nan=False))["real_points"][1]["point"]["ratio"] == 0.7
