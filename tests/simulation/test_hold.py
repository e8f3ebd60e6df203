"""I7: with unlimited hold and without faults nothing becomes stale. And S while the run goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest

from tests.simulator.rollouts.cluster import Cluster
from tests.simulator.rollouts.learner import Figures
from tests.simulator.rollouts.scenario import NAMED, UNLIMITED_HOLD, BoundChange, Scenario, scenario_named

pytestmark = pytest.mark.slow

SWEEP = 34  # Each S from 0 to 16 with an aim and without one
SEEDS = [range(seed, seed + 1) for seed in range(SWEEP)]
LONG = [pytest.param(range(first, first + SWEEP), marks=pytest.mark.long) for first in range(SWEEP, 1020, SWEEP)]


def discarded(figures: Figures) -> int:
    """Rollouts that were called stale, or dropped although they were accepted."""
    return figures.verdicts["stale"] + sum(figures.dropped.values())


@pytest.mark.parametrize("seeds", [*SEEDS, *LONG], ids=str)
def test_with_unlimited_hold_nothing_is_discarded_as_stale(seeds: range) -> None:
    for seed in seeds:
        scenario = scenario_named(UNLIMITED_HOLD, seed)
        figures = Cluster(scenario, seed).run()
        assert discarded(figures) == 0
        assert figures.steps == scenario.steps
        assert figures.staleness_max <= scenario.max_staleness


def test_the_swarms_of_that_test_are_what_they_are_said_to_be() -> None:
    drawn = [scenario_named(UNLIMITED_HOLD, seed) for seed in range(SWEEP)]
    assert {(one.max_staleness, one.adaptive) for one in drawn} == set(product(range(17), (False, True)))
    assert {one.publish_every_steps - one.max_staleness for one in drawn} >= {1}
    assert any(one.publish_every_steps == 1 < one.max_staleness for one in drawn)
    assert max(one.broadcast_s / one.train_step_s for one in drawn) == pytest.approx(3.0)
    assert {one.generation_sigma for one in drawn} == {1.0}
    assert {round(math.exp(2 * one.speed_spread)) for one in drawn} == {50}
    assert any(one.capacity < one.group_size for one in drawn)


def test_without_hold_the_same_swarms_discard() -> None:
    """The sweep is hard enough for the rule to matter: without an aim, which opens fewer groups."""
    impatient = [replace(scenario_named(UNLIMITED_HOLD, seed), patient=False, adaptive=False) for seed in range(17)]
    wasteful = [discarded(Cluster(scenario, seed).run()) for seed, scenario in enumerate(impatient)]
    assert sum(count > 0 for count in wasteful) >= 4


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize(
    "scenario",
    [
        replace(NAMED["sequential-one"], broadcast_s=6.0),
        replace(NAMED["period-4"], broadcast_s=6.0, samplers=1),
        replace(NAMED["churn"], max_staleness=0, samplers=1, generation_sigma=1.0),
        replace(NAMED["failing-calls"], max_staleness=0),
    ],
    ids=["sequential-slow-broadcast", "period-slow-broadcast", "sequential-churn", "sequential-failures"],
)
def test_patience_does_not_stop_the_run(scenario: Scenario, patient: bool) -> None:
    assert Cluster(replace(scenario, patient=patient), 0).run().steps == scenario.steps


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_may_be_changed_at_any_time_and_what_a_lower_one_makes_stale_is_counted_apart(
    seed: int, patient: bool
) -> None:
    scenario = replace(NAMED["dial"], patient=patient)
    figures = Cluster(scenario, seed).run()
    assert figures.steps == scenario.steps
    assert figures.staleness_max <= 6
    assert seed or figures.verdicts["bound_lowered"] + figures.dropped["bound_lowered"] > 0


def test_a_lower_bound_shortens_the_period_and_publishes_at_once() -> None:
    scenario = replace(NAMED["dial"], steps=20, bound_changes=(BoundChange(at_s=9.0, max_staleness=0),), crashes=())
    lines: list[str] = []
    Cluster(scenario, 0, tell=lines.append).run()
    changed = next(i for i, line in enumerate(lines) if "S is set to 0" in line)
    installs = [line.split()[-1] for line in lines[changed:] if " has 0." in line]
    versions = [int(version.removeprefix("0.")) for version in dict.fromkeys(installs)]
    assert versions[-1] == scenario.steps
    assert [later - one for one, later in pairwise(versions[1:])] == [1] * (len(versions) - 2)
