"""The simulator of a whole swarm: departures are made up for, joins cost what they cost, a seed decides everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarm.pay.selection import Rules
from swarm.plan.scenario import Scenario
from swarm.plan.simulate.outcome import LEARNER, Settings
from swarm.plan.simulate.swarm import CapacitySimulation

pytestmark = pytest.mark.slow

SETTINGS = Settings(hours=2.0, max_staleness=4, publish_every_steps=1)

TRAIN_STEP_S = 240.0

STEADY = {"duty": 1.0, "mean_session_h": 1e5, "mtbf_h": 1e5}
"""Nobody goes by himself."""

RESTLESS = {"duty": 0.5, "mean_session_h": 0.5, "mtbf_h": 1.0}


def machines(name: str, price_per_h: float, **other: Any) -> dict[str, Any]:
    """A class of eight, half of which is as fast as the learner of `scenario`, and lines that are alike."""
    return {
        "name": name,
        "count": 8,
        "tokens_per_s": 200.0,
        "price_per_h": price_per_h,
        "down_mbps_median": 400.0,
        "up_mbps_median": 200.0,
        "down_usd_per_gb": 0.0,
        "up_usd_per_gb": 0.0,
        "reachable": 0.75,
        **STEADY,
        **other,
    }


def scenario(*fleet: dict[str, Any], departures: list[dict[str, Any]] | None = None) -> Scenario:
    """A learner that wants 160 rollouts of some 1,100 tokens every four minutes: 750 tokens/s."""
    return Scenario.model_validate(
        {
            "scenario": {"name": "small"},
            "model": {"name": "small", "params": 1e9, "bytes_bf16": 2e9, "load_s": 20.0},
            "delta": {"f1": 0.01, "exp": 0.65, "apply_s": 1.0},
            "learner": {
                "price_per_h": 10.0,
                "train_step_s": TRAIN_STEP_S,
                "rollouts_per_step": 160,
                "group_size": 8,
                "up_mbps": 1000.0,
                "down_mbps": 1000.0,
            },
            "rollout": {"median": 1000.0, "sigma": 0.5, "cap": 4000.0, "tpot_s": 0.02},
            "staleness": {"S": [4]},
            "fleet": list(fleet),
            "simulation": {"hours": 2.0, "departures": departures or []},
        }
    )


def simulation(of: Scenario, *, settings: Settings = SETTINGS, seed: int = 1, **rules: Any) -> CapacitySimulation:
    return CapacitySimulation(of, settings, seed=seed, rules=Rules(**rules))


def idle_share(run: CapacitySimulation, *, after_s: float) -> float:
    """Of the learner's time."""
    waited = [step.waited_s for step in run.timeline.steps if step.at_s > after_s]
    return sum(waited) / (sum(waited) + TRAIN_STEP_S * len(waited))


def test_a_steady_fleet_keeps_the_learner_busy_at_the_price_of_whom_it_takes() -> None:
    figures = simulation(scenario(machines("cheap", 0.1, volunteer=True), machines("dear", 0.5, volunteer=True))).run()
    assert figures.capacity.idle_share < 0.02
    assert figures.capacity.mean_staleness <= SETTINGS.max_staleness
    assert figures.cost_per_hour_by_class["dear"] == 0
    assert figures.cost_per_hour_by_class[LEARNER] == pytest.approx(10.0)
    assert figures.cost_per_hour_by_class["cheap"] == pytest.approx(0.1 * figures.active, rel=0.02)
    assert figures.cost_per_step == pytest.approx(figures.cost_per_hour * TRAIN_STEP_S / 3600, rel=0.02)


def test_a_class_that_vanishes_is_replaced_at_once_and_the_learner_is_busy_within_three_periods() -> None:
    """All of the cheap class vanish after an hour; the dear one is warm."""
    of = scenario(
        machines("cheap", 0.1, volunteer=True),
        machines("dear", 0.5, volunteer=True),
        departures=[{"fleet": "cheap", "at_h": 1.0, "within_s": 180.0}],
    )
    run = simulation(of)
    figures = run.run()
    assert figures.happened.vanished == 8
    assert figures.rollouts_by_class["dear"] > 0
    active = {moment.at_s: moment.active for moment in run.timeline.moments}
    before = max(count for at, count in active.items() if at < 3600)
    assert min(count for at, count in active.items() if at > 3600 + 300) >= min(before, 4)
    assert idle_share(run, after_s=3600 + 180 + 3 * TRAIN_STEP_S) < 0.02


@pytest.mark.long
def test_a_version_that_is_missed_is_made_up_for_by_a_patch_and_a_first_one_is_whole() -> None:
    of = scenario(machines("restless", 0.1, volunteer=True, **RESTLESS), machines("steady", 0.2, volunteer=True))
    run = simulation(of)
    figures = run.run()
    traffic = run.weights.traffic
    assert figures.happened.joins > 8
    first_ones = sum(1 for node in run.nodes.values() if node.kind.name == "restless") * 2e9
    assert traffic.join_bytes < first_ones + 0.5 * figures.happened.joins * 2e9
    assert figures.happened.left > 0
    assert figures.happened.vanished > 0


@pytest.mark.long
def test_what_is_rented_costs_from_its_start_and_nothing_while_it_is_not_needed() -> None:
    rented = machines("rented", 0.3, down_usd_per_gb=0.01, up_usd_per_gb=0.01)
    figures = simulation(scenario(rented, machines("unneeded", 3.0))).run()
    assert figures.cost_per_hour_by_class["unneeded"] == 0
    assert figures.cost_per_hour_by_class["rented"] > 0.3 * 4
    assert figures.capacity.idle_share < 0.02


def test_all_are_active_where_that_is_wanted() -> None:
    figures = simulation(scenario(machines("cheap", 0.1), machines("dear", 0.5)), activate="all").run()
    assert figures.active == pytest.approx(16)
    assert figures.cost_per_hour == pytest.approx(10 + 8 * 0.1 + 8 * 0.5, rel=0.02)


def test_without_anybody_the_learner_waits() -> None:
    of = scenario(machines("cheap", 0.1))
    figures = simulation(of, budget_per_hour=0.0).run()
    assert figures.capacity.idle_share == 1.0
    assert figures.cost_per_hour == pytest.approx(10.0)


@pytest.mark.long
def test_the_same_seed_gives_the_same_figures() -> None:
    of = scenario(machines("restless", 0.1, volunteer=True, **RESTLESS), machines("steady", 0.2))
    short = replace(SETTINGS, hours=1.0)
    first, again, other = (simulation(of, settings=short, seed=seed).run() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_third_of_the_active_killed_is_made_up_for_within_three_periods_and_by_no_more_than_it_takes() -> None:
    of = scenario(
        machines("cheap", 0.1, count=40, tokens_per_s=50.0, volunteer=True),
        machines("dear", 0.2, count=40, tokens_per_s=50.0, volunteer=True),
    )
    run = simulation(of)
    planned: list[int] = []

    def kill() -> None:
        active = [node for node in run.nodes.values() if node.wanted]
        planned.append(len(active))
        for node in active[::3]:
            run._vanish(node)

    run.world.schedule(3600.0, "kill", kill)
    run.run()
    assert idle_share(run, after_s=3600 + 3 * TRAIN_STEP_S) < 0.02
    active = [moment.active for moment in run.timeline.moments if moment.at_s > 3600 + 3 * TRAIN_STEP_S]
    assert max(active) <= 1.15 * planned[0]
    assert min(active) >= 0.85 * planned[0]


@pytest.mark.long
def test_those_who_step_in_for_a_class_that_vanished_count_for_what_they_can_do() -> None:
    """Only the slowest class is left of those that have shown anything: others are not taken for as slow."""
    of = scenario(
        machines("slow", 0.01, count=4, tokens_per_s=60.0, volunteer=True),
        machines("usual", 0.1, count=12, duty=0.8, tokens_per_s=100.0, volunteer=True),
        machines("fast", 1.5, tokens_per_s=500.0),
        departures=[{"fleet": "usual", "at_h": 1.0, "within_s": 180.0}],
    )
    run = simulation(of, settings=replace(SETTINGS, hours=2.5))
    run.run()
    after = [moment.active for moment in run.timeline.moments if moment.at_s > 3600 + 240]
    assert max(after) <= 4 + 3
    assert idle_share(run, after_s=3600 + 180 + 3 * TRAIN_STEP_S) < 0.02


def test_a_learner_that_waits_decides_again_though_no_step_ends() -> None:
    """The only one that was known gives nothing; whoever comes later would never be asked."""
    of = scenario(machines("cheap", 0.1))
    run = simulation(of)
    decisions: list[float] = []
    decide = run._choice.decide

    def counted(*, now: float) -> tuple[list[str], list[str]]:
        decisions.append(now)
        decide(now=now)
        return [], []

    run._choice.decide = counted  # type: ignore[method-assign]
    run.run()
    assert not run.timeline.steps
    assert len(decisions) >= SETTINGS.hours * 3600 / (2 * TRAIN_STEP_S) - 1
