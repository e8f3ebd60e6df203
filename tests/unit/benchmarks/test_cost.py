"""The benchmark of cost: its arithmetic, its changes of a scenario, and what counts as confirmed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cost import finite, line
from benchmarks.cost_prices import (
    CASES,
    bounded,
    cheapest_arm,
    data_centre_factor,
    data_centre_prices,
    edge_factor,
    edge_prices,
    generation,
    generation_factor,
    held_in,
    uplink,
)
from benchmarks.cost_rows import (
    CHOSEN,
    HAND,
    HOURS,
    LONG_HOURS,
    Measured,
    Row,
    hand_of,
    hours_of,
    median_cost,
    savings,
    start_cost,
    worst_hour,
)
from swarm.capacity.plan.arms import Arm
from swarm.capacity.plan.plan import references_of, saving
from swarm.capacity.plan.scenario import Baseline, Colocated, Scenario
from swarm.settings_file import load_file
from swarm.simulate.timeline import StepTaken

LAB = load_file(Scenario, Path(__file__).parents[3] / "examples" / "lab-4b.toml")

ARM = Arm(
    scheme="relay",
    payload="delta",
    activate="cheapest",
    max_staleness=3,
    publish_every_steps=1,
    version_bytes=80e6,
    active=("a", "b"),
    by_class={"x": 2},
    rollouts_per_s=5.0,
    broadcast_s=4.0,
    idle_share=0.0,
    discarded_share=0.0,
    mean_staleness=3.0,
    step_s=100.0,
    binds="learner",
    rent_per_hour=5.0,
    traffic_per_hour=1.0,
    learner_per_hour=10.0,
    cost_per_hour=16.0,
    cost_per_step=16.0 * 100 / 3600,
    feasible=True,
)

BOX = Colocated(gpus=4, price_per_h=10.0, gen_s=140.0, train_s=100.0, switch_s=10.0)
"""250 s a step at 10 an hour: 0.694, of which ARM's 0.444 is 64 %."""

MEASURED = Measured(
    hours=6.0,
    steps=100,
    idle_share=0.0,
    worst_hour_idle_share=0.0,
    discarded_share=0.0,
    mean_staleness=3.0,
    step_s=100.0,
    active=2.0,
    broadcast_s=4.0,
    cost_per_hour=16.0,
    cost_per_step=0.444,
    median_step_cost=0.444,
    start_cost=0.0,
    broadcast_gb_per_hour=1.0,
    join_gb_per_hour=0.0,
    joins=0,
    left=0,
    vanished=0,
)

ROW = Row(
    scenario="lab-4b",
    name="relay delta",
    plan=ARM,
    plan_saving=(0.36, 0.30),
    measured=MEASURED,
    measured_saving=(0.35, 0.29),
    hand=(0.36, 0.29),
)


def step(at_s: float, waited_s: float, cost: float = 0.0) -> StepTaken:
    return StepTaken(at_s=at_s, waited_s=waited_s, mean_staleness=1.0, max_staleness=1, cost=cost)


@pytest.mark.parametrize("wanted", [0.0, 0.2, 1 / 3])
def test_limits_are_where_the_saving_is_what_was_wanted(wanted: float) -> None:
    """Each is put back in and the saving is reckoned anew."""
    x = edge_factor(ARM, BOX, wanted)
    assert 1 - (10 + 1 + 5 * x) * 100 / (10 * 250) == pytest.approx(wanted)
    x = generation_factor(ARM, BOX, wanted)
    assert 1 - 16 * 100 / (10 * (110 + 140 * x)) == pytest.approx(wanted)
    x = data_centre_factor(ARM, BOX, wanted)
    assert 1 - (10 * x + 6) * 100 / (10 * x * 250) == pytest.approx(wanted)


def test_limits_that_no_price_reaches() -> None:
    assert edge_factor(ARM, BOX, 0.6) < 0
    assert edge_factor(replace(ARM, rent_per_hour=0.0), BOX, 0.57) == -math.inf
    assert edge_factor(replace(ARM, rent_per_hour=0.0), BOX, 0.55) == math.inf
    assert data_centre_factor(ARM, BOX, 0.6) == math.inf
    assert generation_factor(ARM, BOX.model_copy(update={"price_per_h": 100.0}), 0.0) < 0


def test_a_case_changes_what_it_says() -> None:
    colocated = LAB.baseline.colocated
    assert colocated is not None
    assert generation(0.5)(LAB).baseline.colocated == colocated.model_copy(update={"gen_s": 85.0})
    assert [one.price_per_h for one in edge_prices(2)(LAB).fleet] == [2 * one.price_per_h for one in LAB.fleet]
    assert uplink(100)(LAB).learner.up_mbps == 100
    assert bounded(6)(LAB).staleness.S == (2, 3, 6)
    assert bounded(1)(LAB).staleness.S == (1,)
    cheap = references_of(data_centre_prices(0.5)(LAB))
    assert [one.cost_per_step for one in cheap] == [0.5 * one.cost_per_step for one in references_of(LAB)]
    assert data_centre_prices(0.5)(LAB).learner.price_per_h == 0.5 * LAB.learner.price_per_h
    assert CASES[0].change(LAB) == LAB


@pytest.mark.slow
def test_a_baseline_that_generates_faster_leaves_less_to_save() -> None:
    """The limit of the closed form, put into the scenario, gives the saving that it was asked for."""
    arm = cheapest_arm(LAB.model_copy(update={"baseline": Baseline()}), "relay", "delta")
    assert LAB.baseline.colocated is not None
    factor = generation_factor(arm, LAB.baseline.colocated, 1 / 3)
    held = held_in(replace(CASES[0], change=generation(factor)), LAB)
    assert held.saving["colocated"] == pytest.approx(1 / 3)
    assert held.saving["async_dc"] == pytest.approx(saving(arm.cost_per_step, references_of(LAB)[1]))


@pytest.mark.parametrize(
    ("told", "seen", "plan_is", "hand_is"),
    [
        ((0.36, 0.30), (0.35, 0.29), "confirmed", "confirmed"),
        ((0.36, 0.30), (0.32, 0.26), "refuted", "refuted"),
        ((0.30, 0.30), (0.34, 0.30), "refuted", "confirmed"),
        ((0.36, 0.30), (0.36, 0.25), "confirmed", "refuted"),
    ],
)
def test_what_is_confirmed_is_within_three_points(
    told: tuple[float, float], seen: tuple[float, float], plan_is: str, hand_is: str
) -> None:
    row = replace(ROW, plan_saving=told, measured_saving=seen)
    assert (row.plan_verdict, row.hand_verdict) == (plan_is, hand_is)


def test_without_a_simulation_the_plan_is_held_against_the_figure_by_hand() -> None:
    row = replace(ROW, plan_saving=(0.2, 0.2), measured=None, measured_saving=None)
    assert (row.plan_verdict, row.hand_verdict) == ("", "refuted")
    assert replace(row, plan_saving=(0.36, 0.29)).hand_verdict == "confirmed"
    assert replace(row, hand=None).hand_verdict == ""
    assert not row.is_met


@pytest.mark.parametrize(("share", "idle", "met"), [(0.333, 0.03, True), (0.332, 0.0, False), (0.5, 0.031, False)])
def test_the_target_is_a_saving_with_a_busy_learner(share: float, idle: float, met: bool) -> None:
    row = replace(ROW, measured=replace(MEASURED, idle_share=idle), measured_saving=(share, 0.3))
    assert row.is_met == met
    assert (" *" in line(row)) == (idle > 0.03)


def test_an_arm_whose_learner_waits_is_marked() -> None:
    waits = replace(ROW, plan=replace(ARM, idle_share=0.021), measured=None, measured_saving=None)
    assert " *" in line(waits)
    assert not waits.is_equal


def test_what_a_start_costs() -> None:
    """Ten an hour later on: of the 40 until the last batch of the warm-up, at half an hour, 35 are extra."""
    steps = [step(900, 0, 15), step(1800, 0, 25), step(3600, 0, 5)]
    assert start_cost(steps, 10.0, until_s=2000.0) == pytest.approx(35)
    assert start_cost(steps, 10.0, until_s=100.0) == 0


def test_the_median_step_forgets_an_unusual_hour() -> None:
    steps = [step(100, 0, 50), step(3700, 0, 3), step(3800, 0, 4), step(7300, 0, 90)]
    assert median_cost(steps, begin_s=3600.0) == 4
    assert median_cost(steps, begin_s=9000.0) == 0


def test_the_worst_hour() -> None:
    steps = [step(100, 1000), step(3700, 0), step(3800, 25), step(7300, 50)]
    assert worst_hour(steps, 100.0, begin_s=3600.0) == pytest.approx(50 / 150)
    assert worst_hour(steps, 100.0, begin_s=9000.0) == 1.0


def test_savings_are_against_the_two_baselines() -> None:
    colocated, async_dc = references_of(LAB)
    assert savings(colocated.cost_per_step, (colocated, async_dc))[0] == 0
    assert savings(2 * async_dc.cost_per_step, (colocated, async_dc))[1] == -1


def test_figures_by_hand_belong_to_cheapest_sets_of_the_paper_s_bound() -> None:
    assert hand_of("lab-4b", ARM) == HAND["lab-4b"]["relay delta"]
    assert hand_of("lab-4b", replace(ARM, activate="all")) is None
    assert hand_of("lab-4b", replace(ARM, max_staleness=11)) is None


def test_the_chosen_arm_runs_longest() -> None:
    for scenario, hours in HOURS.items():
        assert hours_of(scenario, *CHOSEN, most=LONG_HOURS) == LONG_HOURS
        assert hours_of(scenario, "relay full", "cheapest", most=LONG_HOURS) == hours
        assert hours_of(scenario, *CHOSEN, most=2.0) == 2.0
    assert hours_of("internet-32b", "relay full", "all", most=LONG_HOURS) == 0


def test_json_has_no_infinities() -> None:
    assert finite({"a": [math.inf, 1.0], "b": (math.nan, None)}) == {"a": [None, 1.0], "b": [None, None]}
