"""The benchmark of activation: its optimum is one, and a choice that is too dear would be seen."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("scipy", reason="the extra bench is not installed")

from benchmarks.activation import Row, demand_of, fleet_of, min_price, offers_of, row_of, summary
from swarm.pay.cover import cover


def test_the_program_finds_what_an_exact_search_of_a_small_fleet_finds() -> None:
    for seed in range(5):
        random = Random(seed)
        fleet = fleet_of(12, random)
        offers = offers_of(demand_of(fleet, random), fleet)
        offers = [*offers]
        need = 0.5 * sum(offer.useful_rollouts_per_s for offer in offers)
        exact = min(
            sum(o.price_per_hour for i, o in enumerate(offers) if chosen >> i & 1)
            for chosen in range(2 ** len(offers))
            if sum(o.useful_rollouts_per_s for i, o in enumerate(offers) if chosen >> i & 1) >= need
        )
        assert min_price(offers, need) == pytest.approx(exact, rel=1e-3)
        assert cover(offers, need) is not None


def test_a_row_compares_a_choice_with_it() -> None:
    row = row_of(40, 3)
    assert row is not None
    assert -0.005 < row.excess < 0.02


def test_the_worst_row_decides() -> None:
    rows = [Row(size=50, chosen=10, price=price, min_price=1.0, choice_s=0.1) for price in (1.0, 1.001, 1.03)]
    found = summary(rows, infeasible=2)
    assert found["max_excess_percent"] == pytest.approx(3.0)
    assert found["median_excess_percent"] == pytest.approx(0.1)
    assert found["infeasible"] == 2
