"""Formulas of capacity as tables, predictions that can be made by hand, and what is said of bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.capacity.classes import MAX_CLASSES, alike, thinned
from swarm.capacity.fleet import Demand, Lengths, Worker
from swarm.capacity.model import Binds, mu_min, predict, shortfall
from swarm.capacity.recursion import Recursion
from tests.closed_forms import min_step_s, mu_min_pausing, mu_necessary, mu_sufficient

EQUAL = Lengths(tokens=(1000.0,))
UNEVEN = Lengths(tokens=(1000.0, 5000.0))
LONG_TAIL = Lengths.lognormal(median=1800, sigma=1.0, cap=8192)


def demand(
    max_staleness: int = 1, *, period: int = 1, lengths: Lengths = EQUAL, groups: int = 8, size: int = 4
) -> Demand:
    return Demand(
        train_step_s=60.0,
        groups_per_step=groups,
        group_size=size,
        publish_every_steps=period,
        max_staleness=max_staleness,
        lengths=lengths,
    )


def sampler(name: str = "a", *, places: int = 64, place_s: float = 30.0, lockstep: bool = False) -> Worker:
    return Worker(name=name, rollouts_per_s=places / place_s, samples_at_once=places, lockstep=lockstep)


@pytest.mark.parametrize(
    ("period", "broadcast_s", "expected"),
    [
        (1, 0, 512 / 60),
        (1, 30, 512 / 30),
        (2, 30, 1024 / 90),
        (3, 150, 1536 / 30),
        (1, 60, math.inf),
        (1, 90, math.inf),
    ],
)
def test_samplers_that_pause_lose_a_broadcast_in_each_period(period: int, broadcast_s: float, expected: float) -> None:
    least = mu_min_pausing(
        rollouts_per_step=512, publish_every_steps=period, train_step_s=60.0, broadcast_s=broadcast_s
    )
    assert least == pytest.approx(expected)


@pytest.mark.parametrize(
    ("max_staleness", "period", "broadcast_s", "generation_s", "necessary", "sufficient"),
    [
        (1, 1, 18, 18, 512 / 42, 512 / 24),
        (2, 1, 18, 18, 512 / 60, 512 / 60),
        (2, 1, 90, 20, 512 / 30, 512 / 10),
        (2, 1, 90, 40, 512 / 30, math.inf),
        (3, 2, 66, 24, 512 / 54, 512 / 30),
        (1, 2, 0, 0, math.inf, math.inf),
        (0, 1, 0, 10, math.inf, math.inf),
        (6, 1, 120, 100, 512 / 60, 512 / 60),
    ],
)
def test_samplers_that_fetch_while_they_generate_have_what_the_bound_leaves(
    max_staleness: int, period: int, broadcast_s: float, generation_s: float, necessary: float, sufficient: float
) -> None:
    least = mu_necessary(
        rollouts_per_step=512,
        publish_every_steps=period,
        max_staleness=max_staleness,
        train_step_s=60.0,
        broadcast_s=broadcast_s,
    )
    enough = mu_sufficient(
        rollouts_per_step=512,
        publish_every_steps=period,
        max_staleness=max_staleness,
        train_step_s=60.0,
        broadcast_s=broadcast_s,
        generation_s=generation_s,
    )
    assert least == pytest.approx(necessary)
    assert enough == pytest.approx(sufficient)


EQUAL_LENGTHS = [
    (0, 1, 18, 108.0),
    (1, 1, 18, 60.0),
    (1, 1, 54, 72.0),
    (1, 1, 90, 90.0),
    (2, 1, 90, 60.0),
    (1, 2, 18, 84.0),
    (2, 2, 54, 72.0),
    (3, 2, 100, 62.5),
    (3, 3, 54, 68.0),
    (4, 3, 100, 190 / 3),
    (4, 2, 200, 72.5),
]
"""S, kappa, T_b and the step that they give with T = 60, T_gen = 30 and a place for each of 32 rollouts, twice."""


@pytest.mark.parametrize(("max_staleness", "period", "broadcast_s", "step_s"), EQUAL_LENGTHS)
def test_a_step_of_equal_lengths_has_a_closed_form(
    max_staleness: int, period: int, broadcast_s: float, step_s: float
) -> None:
    least = min_step_s(
        rollouts_per_step=32,
        publish_every_steps=period,
        max_staleness=max_staleness,
        train_step_s=60.0,
        broadcast_s=broadcast_s,
        batch_s=30.0,
        rollouts_per_s=64 / 30,
    )
    assert least == pytest.approx(step_s)


@pytest.mark.parametrize(("max_staleness", "period", "broadcast_s", "step_s"), EQUAL_LENGTHS)
def test_prediction_agrees_with_the_closed_form(
    max_staleness: int, period: int, broadcast_s: float, step_s: float
) -> None:
    told = predict(demand(max_staleness, period=period), [sampler()], [broadcast_s])
    assert told.step_s == pytest.approx(step_s)
    assert told.idle_share == pytest.approx(1 - 60 / step_s)
    assert told.rollouts_per_s == pytest.approx(32 / step_s)
    assert told.discarded_share == 0


def test_the_prediction_that_docs_make_by_hand() -> None:
    told = predict(demand(1, lengths=UNEVEN), [sampler()], [54.0])
    assert told.step_s == pytest.approx(82.0)
    assert told.idle_share == pytest.approx(22 / 82)
    assert told.mean_staleness == pytest.approx(1.0)
    assert told.samplers_idle_share == pytest.approx(1 - 32 * 30 / (64 * 82), rel=0.001)
    assert told.binds == "broadcast"
    assert predict(demand(2, lengths=UNEVEN), [sampler()], [54.0]).step_s == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("lengths", "max_staleness", "places", "broadcast_s", "expected"),
    [
        (EQUAL, 2, 64, 18, "learner"),
        (EQUAL, 2, 8, 18, "rate"),
        (EQUAL, 1, 64, 90, "broadcast"),
        (UNEVEN, 1, 64, 24, "generation"),
    ],
)
def test_what_binds_is_named(
    lengths: Lengths, max_staleness: int, places: int, broadcast_s: float, expected: Binds
) -> None:
    told = predict(demand(max_staleness, lengths=lengths), [sampler(places=places)], [broadcast_s])
    assert told.binds == expected


@pytest.mark.parametrize("max_staleness", [4, 8])
def test_a_fleet_that_is_fast_enough_gives_young_rollouts_and_keeps_the_learner_busy(max_staleness: int) -> None:
    need = demand(max_staleness, lengths=LONG_TAIL, groups=64, size=1)
    fleet = [sampler(f"w{i}", places=1, place_s=18.0) for i in range(26)]
    young = predict(need, fleet, [18.0] * 26)
    early = predict(replace(need, freshness="off"), fleet, [18.0] * 26)
    assert early.mean_staleness == pytest.approx(max_staleness, abs=0.6)
    assert young.mean_staleness < 2
    assert young.idle_share < early.idle_share + 0.005
    assert young.binds == early.binds == "learner"


def test_more_samplers_make_rollouts_younger_but_no_younger_than_a_version_and_an_answer_take() -> None:
    need = demand(8, lengths=LONG_TAIL, groups=64, size=1)
    found = [
        predict(need, [sampler(f"w{i}", places=1, place_s=18.0) for i in range(count)], [18.0] * count)
        for count in (20, 26, 40, 80)
    ]
    ages = [one.mean_staleness for one in found]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] > ages[-1] + 0.3
    assert ages[-1] > 1


def test_an_aim_that_only_settles_after_a_hundred_steps_is_predicted_settled() -> None:
    """A fleet four times as fast as needed: the aim falls from 3 to 2, which takes a learner sixty steps."""
    need = demand(3, lengths=LONG_TAIL, groups=32, size=8)
    fleet = [sampler(f"w{i}", places=8, place_s=18.0) for i in range(39)]
    settled = Recursion(*thinned(need, fleet, [3.0] * 39))
    settled.steps(100)
    settled.steps(50)
    told = predict(need, fleet, [3.0] * 39)
    assert told.mean_staleness == pytest.approx(settled.tally.staleness / settled.tally.trained, abs=0.1)


def test_a_rate_that_was_searched_is_enough_and_hardly_more() -> None:
    need = demand(2, lengths=LONG_TAIL, groups=64, size=1)
    fleet = [sampler(str(i), places=1, place_s=18.0) for i in range(20)]
    least = mu_min(need, fleet, [18.0] * 20)
    necessary = mu_necessary(
        rollouts_per_step=64, publish_every_steps=1, max_staleness=2, train_step_s=60.0, broadcast_s=18.0
    )
    assert 0.98 * necessary <= least < 1.3 * necessary
    assert mu_min(need, fleet, [18.0] * 20, idle_target=0.2) < 0.9 * least


def test_what_no_rate_can_do_has_no_least_rate() -> None:
    assert mu_min(demand(0), [sampler()], [6.0]) == math.inf
    assert mu_min(demand(2), [], []) == math.inf


def test_without_samplers_the_learner_is_idle() -> None:
    told = predict(demand(), [], [])
    assert (told.idle_share, told.step_s, told.rollouts_per_s, told.binds) == (1.0, math.inf, 0.0, "rate")


def test_long_tails_and_groups_cost_more_than_a_mean_says() -> None:
    fleet = [sampler(str(i), places=8, place_s=18.0) for i in range(5)]
    idle = [
        predict(demand(1, lengths=lengths, groups=groups, size=size), fleet, [18.0] * 5).idle_share
        for lengths, groups, size in ((EQUAL, 64, 1), (LONG_TAIL, 64, 1), (LONG_TAIL, 8, 8))
    ]
    assert idle[0] < idle[1] < idle[2] - 0.05


def test_the_slow_link_of_a_few_does_not_delay_all() -> None:
    fleet = [sampler(str(i), places=8, place_s=18.0) for i in range(10)]
    need = demand(2, groups=128, size=1)
    one_slow = predict(need, fleet, [6.0] * 9 + [110.0])
    all_slow = predict(need, fleet, [110.0] * 10)
    assert one_slow.idle_share < 0.02
    assert all_slow.idle_share > 0.1


@pytest.mark.parametrize(("lockstep", "samples", "longest_of"), [(False, 1, 1), (True, 4, 32)])
def test_a_large_swarm_is_thinned_with_its_rate_and_times(lockstep: bool, samples: int, longest_of: int) -> None:
    need = demand(2, groups=256, size=8)
    fleet = [sampler(str(i), places=32, lockstep=lockstep) for i in range(30)]
    small, classes = thinned(need, fleet, [6.0] * 30)
    (units,) = classes
    assert (small.groups_per_step, units.samples, units.longest_of) == (32, samples, longest_of)
    assert units.unit_s == pytest.approx(30.0)
    assert units.units * units.samples / units.unit_s == pytest.approx(sum(w.rollouts_per_s for w in fleet) / 8)


def test_a_class_of_one_keeps_its_pace_in_a_thinned_swarm() -> None:
    need = demand(2, groups=256, size=16)
    fleet = [sampler(str(i), places=1, place_s=20 + i % 7) for i in range(800)] + [
        sampler("slow", places=1, place_s=90)
    ]
    _, classes = thinned(need, fleet, [6.0] * 801)
    assert max(units.unit_s for units in classes) < 100
    rate = sum(units.units * units.samples / units.unit_s for units in classes)
    assert rate == pytest.approx(sum(worker.rollouts_per_s for worker in fleet) / 16)


def test_a_thousand_different_samplers_are_a_few_classes() -> None:
    fleet = [sampler(str(i), places=1 + i % 40, place_s=10 + 0.1 * i) for i in range(1000)]
    classes = alike(demand(2), fleet, [0.3 * i for i in range(1000)])
    assert len(classes) <= MAX_CLASSES
    assert sum(len(one) for one in classes) == 1000


def test_a_shortfall_is_told_with_its_inequality() -> None:
    assert shortfall(demand(2), broadcast_s=60, generation_s=59) is None
    assert shortfall(demand(1), broadcast_s=40, generation_s=30) == (
        "broadcast_s + generation_s < (max_staleness + 1 - publish_every_steps) * train_step_s fails: "
        "40 + 30 is not below 60, by 10 s"
    )
    assert "is not below 0, by 30 s" in (shortfall(demand(0), broadcast_s=10, generation_s=20) or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_step_s": 0.0}, "train_step_s is 0, it must be positive and finite"),
        ({"train_step_s": math.nan}, "train_step_s is nan, it must be positive and finite"),
        ({"groups_per_step": -1}, "groups_per_step is -1, it must be positive and finite"),
        ({"group_size": 0}, "group_size is 0, it must be positive and finite"),
        ({"max_staleness": -1}, "max_staleness is -1, it must be finite and not negative"),
        ({"publish_every_steps": 3}, "publish_every_steps is 3, it must be at most max_staleness \\+ 1 = 2, or all"),
    ],
)
def test_a_demand_that_makes_no_sense_is_named(change: dict[str, float], message: str) -> None:
    broken = replace(demand(1), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        predict(broken, [sampler()], [1.0])
    with pytest.raises(ValueError, match=message):
        shortfall(broken, broadcast_s=1.0, generation_s=1.0)


@pytest.mark.parametrize(
    ("worker", "install_s", "message"),
    [
        (replace(sampler(), rollouts_per_s=0.0), 1.0, "worker a: rollouts_per_s is 0, it must be positive and finite"),
        (replace(sampler(), rollouts_per_s=-2.0), 1.0, "worker a: rollouts_per_s is -2, it must be"),
        (replace(sampler(), rollouts_per_s=math.nan), 1.0, "worker a: rollouts_per_s is nan, it must be"),
        (replace(sampler(), samples_at_once=0), 1.0, "worker a: samples_at_once is 0, it must be"),
        (sampler(), -1.0, "worker a: install_s is -1, it must be finite and not negative"),
        (sampler(), math.inf, "worker a: install_s is inf, it must be finite and not negative"),
    ],
)
def test_a_worker_that_makes_no_sense_is_named(worker: Worker, install_s: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(demand(), [worker], [install_s])
    with pytest.raises(ValueError, match=message):
        mu_min(demand(), [worker], [install_s])


def test_other_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="install_s has 2 entries for 1 workers"):
        predict(demand(), [sampler()], [1.0, 2.0])
    with pytest.raises(ValueError, match="idle_target is 0, it must be between 0 and 1"):
        mu_min(demand(), [sampler()], [1.0], idle_target=0.0)
    with pytest.raises(ValueError, match="generation_s is nan, it must be finite and not negative"):
        shortfall(demand(), broadcast_s=1.0, generation_s=math.nan)
