"""Prices, shares and reserves as formulas."""

from __future__ import annotations

import math

import pytest

from swarm.pay.fleet import Worker
from swarm.pay.prices import (
    churn_reserve,
    churn_variance,
    fault_of,
    missing_share,
    price_per_hour,
    start_per_hour,
    traffic_per_hour,
    usable_share,
    waiting_share,
)
from tests.capacity import demand, worker


@pytest.mark.parametrize(
    ("max_staleness", "period", "install_s", "place_s", "share"),
    [
        (6, 1, 0.0, 0.0, 1.0),
        (1, 1, 60.0, 0.0, 0.5),
        (1, 1, 60.0, 100.0, 0.25),
        (1, 1, 36.0, 36.0, 1 / 1.639344),
        (2, 2, 120.0, 0.0, 0.0),
    ],
)
def test_what_is_timely_counts(max_staleness: int, period: int, install_s: float, place_s: float, share: float) -> None:
    wanted = demand(train_step_s=120.0, max_staleness=max_staleness, period=period)
    assert usable_share(wanted, install_s=install_s, place_s=place_s) == pytest.approx(share, rel=1e-4)


def test_who_delays_a_waiting_learner_less_is_worth_more() -> None:
    wanted = demand(train_step_s=100.0, max_staleness=0)
    assert waiting_share(wanted, install_s=50.0, place_s=50.0) == 0.5
    assert waiting_share(wanted, install_s=0.0, place_s=50.0) > 0.5


@pytest.mark.parametrize(("departures_per_hour", "replace_s", "share"), [(0.0, 600.0, 0.0), (0.1, 360.0, 0.01 / 1.01)])
def test_a_place_is_empty_while_another_one_starts(departures_per_hour: float, replace_s: float, share: float) -> None:
    assert missing_share(departures_per_hour=departures_per_hour, replace_s=replace_s) == pytest.approx(share)


@pytest.mark.parametrize(
    ("rates", "missing", "reserve"), [([], [], 0.0), ([2.0], [0.5], 1.645), ([1.0] * 100, [0.1] * 100, 1.645 * 3.0)]
)
def test_the_reserve_is_what_is_needed_95_percent(rates: list[float], missing: list[float], reserve: float) -> None:
    variance = sum(churn_variance(rate, share) for rate, share in zip(rates, missing, strict=True))
    assert churn_reserve(variance) == pytest.approx(reserve)


def test_a_price_is_rent_starts_and_metered_versions() -> None:
    one = Worker(
        name="n",
        rollouts_per_s=0.5,
        cost_per_hour=0.36,
        down_cost_per_gb=0.004,
        up_cost_per_gb=0.006,
        start_s=600.0,
        departures_per_hour=0.1,
    )
    assert traffic_per_hour(one, down_bytes=2e9, up_bytes=1e9, versions_per_hour=30.0) == pytest.approx(0.42)
    assert start_per_hour(one) == pytest.approx(0.006)
    assert price_per_hour(one, down_bytes=2e9, up_bytes=1e9, versions_per_hour=30.0) == pytest.approx(0.786)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (worker("n", 1.0, 0.0), None),
        (worker("n", 1.0, -0.1), "prices"),
        (worker("n", 1.0, math.nan), "prices"),
        (worker("n", 1.0, 1.0, metered=math.inf), "prices"),
        (worker("n", -1.0, 1.0), "rate"),
        (worker("n", math.nan, 1.0), "rate"),
        (worker("n", 1.0, 1.0, departures_per_hour=math.nan), "departures"),
        (worker("n", 1.0, 1.0, places=0), "no place"),
    ],
)
def test_figures_without_sense_are_named(one: Worker, said: str | None) -> None:
    fault = fault_of(one)
    assert (fault is None) if said is None else (fault is not None and said in fault)
