"""The benchmark of cost simulates what it planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost_prices import cheapest_arm
from benchmarks.cost_rows import MAX_IDLE, async_idle, measure
from swarm.capacity.plan.plan import references_of
from swarm.capacity.plan.scenario import Baseline, Scenario
from swarm.settings_file import load_file

LAB = load_file(Scenario, Path(__file__).parents[2] / "examples" / "lab-4b.toml")


@pytest.mark.long
def test_half_an_hour_of_the_chosen_arm_costs_what_was_planned() -> None:
    arm = cheapest_arm(LAB.model_copy(update={"baseline": Baseline()}), "relay", "delta")
    found = measure(LAB, arm, hours=0.5, seed=1)
    assert found.hours == pytest.approx(0.375)
    assert found.idle_share <= MAX_IDLE
    assert found.cost_per_step == pytest.approx(arm.cost_per_step, rel=0.05)
    assert found.mean_staleness <= arm.max_staleness


@pytest.mark.slow
def test_the_baseline_s_learner_hardly_waits() -> None:
    assert async_idle(LAB, references_of(LAB)[1], 3, seed=1, steps=10) < 0.05
