"""The benchmark of activation: its optimum is one, and a choice is compared with it."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("scipy", reason="the extra bench is not installed")

from benchmarks.activation import demand_of, fleet_of, min_price, offers_of, row_of, summary


def test_the_program_finds_what_an_exact_search_of_a_small_fleet_finds() -> None:
    random = Random(0)
    fleet = fleet_of(12, random)
    offers = offers_of(demand_of(fleet, random), fleet)
    need = 0.5 * sum(offer.useful_rollouts_per_s for offer in offers)
    sets = ([o for i, o in enumerate(offers) if chosen >> i & 1] for chosen in range(2 ** len(offers)))
    enough = (one for one in sets if sum(o.useful_rollouts_per_s for o in one) >= need)
    exact = min(sum(o.price_per_hour for o in one) for one in enough)
    assert min_price(offers, need) == pytest.approx(exact, rel=1e-3)


def test_a_row_compares_a_choice_with_it() -> None:
    row = row_of(40, 3)
    assert row is not None
    found = summary([row], infeasible=2)
    assert -0.5 < found["max_excess_percent"] < 2
    assert found.keys() >= {"fleets", "infeasible", "median_excess_percent", "median_choice_s", "max_choice_s"}
