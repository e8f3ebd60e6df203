"""Formulas of capacity as tables, predictions that can be made by hand, and what is said of bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.pay.fleet import Demand, Lengths, Worker
from swarm.pay.model import Binds, fill_s, predict, shortfall

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


EQUAL_LENGTHS = [
    (0, 1, 18, 108.0),
    (1, 1, 54, 72.0),
    (2, 1, 90, 60.0),
    (1, 2, 18, 84.0),
    (3, 2, 100, 62.5),
    (4, 3, 100, 190 / 3),
    (4, 2, 200, 72.5),
]
"""S, kappa, T_b and the step that they give with T = 60, T_gen = 30 and a place for each of 32 rollouts, twice."""


@pytest.mark.parametrize(("max_staleness", "period", "broadcast_s", "step_s"), EQUAL_LENGTHS)
def test_a_step_of_equal_lengths_by_hand(max_staleness: int, period: int, broadcast_s: float, step_s: float) -> None:
    told = predict(demand(max_staleness, period=period), [sampler()], [broadcast_s])
    assert told.step_s == pytest.approx(step_s)
    assert told.idle_share == pytest.approx(1 - 60 / step_s)


def test_the_prediction_that_docs_make_by_hand() -> None:
    told = predict(demand(1, lengths=UNEVEN), [sampler()], [54.0])
    assert told.step_s == pytest.approx(82.0)
    assert told.idle_share == pytest.approx(22 / 82)
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


def test_without_samplers_the_learner_is_idle() -> None:
    told = predict(demand(), [], [])
    assert (told.idle_share, told.step_s, told.binds) == (1.0, math.inf, "rate")


def test_long_tails_and_groups_cost_more_than_a_mean_says() -> None:
    fleet = [sampler(str(i), places=8, place_s=18.0) for i in range(5)]
    idle = [
        predict(demand(1, lengths=lengths, groups=groups, size=size), fleet, [18.0] * 5).idle_share
        for lengths, groups, size in ((EQUAL, 64, 1), (LONG_TAIL, 64, 1), (LONG_TAIL, 8, 8))
    ]
    assert idle[0] < idle[1] < idle[2] - 0.03


def test_each_sample_goes_to_the_place_that_is_done_first() -> None:
    """Four of a fast engine that gets the version late, against the slow places that have it at once."""
    need = demand(groups=4, size=1)
    slow, fast = sampler("slow", places=4, place_s=100.0), sampler("fast", places=4, place_s=10.0)
    assert fill_s(need, [slow, fast], [0.0, 50.0]) == pytest.approx(60.0)
    assert fill_s(need, [slow, fast], [0.0, 95.0]) == pytest.approx(100.0)
    assert fill_s(need, [sampler("batch", places=4, place_s=10.0, lockstep=True)], [5.0]) == pytest.approx(15.0)


def test_a_shortfall_is_told_with_its_inequality() -> None:
    assert shortfall(demand(2), broadcast_s=60, generation_s=59) is None
    assert shortfall(demand(1), broadcast_s=40, generation_s=30) == (
        "broadcast_s + generation_s < (max_staleness + 1 - publish_every_steps) * train_step_s fails: "
        "40 + 30 is not below 60, by 10 s"
    )
    assert "is not below 0, by 30 s" in (shortfall(demand(0), broadcast_s=10, generation_s=20) or "")
    with pytest.raises(ValueError, match="generation_s is nan, it must be finite and not negative"):
        shortfall(demand(), broadcast_s=1.0, generation_s=math.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    ("workers", "install_s", "message"),
    [
        ([replace(sampler(), rollouts_per_s=0.0)], [1.0], "worker a: rollouts_per_s is 0, it must be positive"),
        ([replace(sampler(), samples_at_once=0)], [1.0], "worker a: samples_at_once is 0, it must be"),
        ([sampler()], [math.inf], "worker a: install_s is inf, it must be finite and not negative"),
        ([sampler()], [1.0, 2.0], "install_s has 2 entries for 1 workers"),
    ],
)
def test_workers_that_make_no_sense_are_named(workers: list[Worker], install_s: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(demand(), workers, install_s)
