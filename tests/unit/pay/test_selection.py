"""Which samplers are chosen, what is said to the others, and what is answered where no choice is good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from swarm.pay.cover import cover
from swarm.pay.fleet import Dissemination, Worker
from swarm.pay.prices import PricedOffer
from swarm.pay.selection import Rules, Search, Selection
from tests.capacity import by_downlink, demand, random_fleet, star, subsets, worker

NEED = 512 / 120


def choose(workers: list[Worker], rules: Rules | None = None, *, kept: tuple[str, ...] = ()) -> Selection:
    return Search(demand(), workers, by_downlink, rules or Rules(), kept=kept).select()


def cards(count: int, rate: float, cost: float, name: str = "card") -> list[Worker]:
    return [worker(f"{name}{number}", rate, cost) for number in range(count)]


def test_the_cheapest_per_rollout_are_chosen_and_no_more_than_needed() -> None:
    cheap, dear = cards(20, 0.3, 0.2, "cheap"), cards(20, 0.6, 0.9, "dear")
    found = choose(dear + cheap)
    assert found.feasible
    assert {name[:5] for name in found.active} == {"cheap"}
    assert (len(found.active) - 1) * 0.3 < NEED * 1.05 <= len(found.active) * 0.3
    assert found.cost_per_hour == pytest.approx(0.2 * len(found.active))
    assert found.has_margin


def test_a_volunteer_whose_rollouts_would_be_stale_is_left_out_and_told() -> None:
    slow = worker("slow", 5.0, 0.0, downlink=80e6 / 2000)
    found = choose([slow, *cards(20, 0.4, 0.1)])
    assert "slow" not in found.active
    assert "too old" in found.standby["slow"]


def test_metered_traffic_and_starts_of_those_who_often_leave_count_in_the_ranking() -> None:
    metered = [worker(f"metered{number}", 0.3, 0.19, metered=0.1) for number in range(20)]
    found = choose(metered + cards(20, 0.3, 0.2))
    assert {name[:4] for name in found.active} == {"card"}
    assert choose(metered).cost_per_hour == pytest.approx(len(choose(metered).active) * (0.19 + 30 * 0.008))
    leaving = [worker(f"leaving{n}", 0.3, 0.2, start_s=1800, departures_per_hour=0.5) for n in range(20)]
    assert {name[:4] for name in choose(leaving + cards(20, 0.3, 0.22)).active} == {"card"}


def test_departures_ask_for_more() -> None:
    leaving = [replace(one, departures_per_hour=0.3) for one in cards(40, 0.3, 0.2)]
    steady, shaky = choose(cards(40, 0.3, 0.2)), choose(leaving)
    assert len(shaky.active) > len(steady.active)
    assert shaky.needed_rollouts_per_s > steady.needed_rollouts_per_s


def test_equal_choices_keep_who_is_active() -> None:
    fleet = cards(40, 0.3, 0.2)
    kept = tuple(sorted(f"card{number}" for number in range(20, 35)))
    assert choose(fleet, kept=kept).active == kept


def test_those_who_wait_are_told_why() -> None:
    odd = worker("odd", math.inf, 0.1)
    found = choose([odd, *cards(20, 0.3, 0.18), worker("dear", 0.5, 2.0), *cards(1, 0.0, 0.1, "new")])
    assert "odd" not in found.active
    assert "rate" in found.standby["odd"]
    assert found.standby["dear"] == (
        "at 1.11 per 1,000 rollouts you cost more than the samplers that suffice (at most 0.17)"
    )
    assert "not known yet" in found.standby["new0"]
    waiting = [name for name in found.standby if name.startswith("card")]
    assert waiting
    assert all("step in when some leave" in found.standby[name] for name in waiting)


def test_nobody_there_is_an_answer() -> None:
    found = choose([])
    assert not found.feasible
    assert found.active == ()
    assert found.prediction.idle_share == 1.0
    assert "no sampler with a known rate" in found.why


def test_a_fleet_that_is_too_slow_is_active_and_that_is_said() -> None:
    found = choose(cards(8, 0.3, 0.2))
    assert not found.feasible
    assert len(found.active) == 8
    assert found.prediction.idle_share == pytest.approx(1 - 8 * 0.3 / NEED)
    assert "idle 44%" in found.why
    assert "are needed" in found.why
    found = choose(cards(15, 0.285, 0.2))
    assert (found.feasible, found.has_margin, len(found.active)) == (True, False, 15), "good enough without the margin"


@pytest.mark.parametrize("activate", ["all", "cheapest"])
def test_the_budget_is_kept_and_what_is_missing_is_said(activate: str) -> None:
    rules = Rules(activate="all" if activate == "all" else "cheapest", budget_per_hour=1.5)
    fleet = [*cards(3, 0.2, 0.0, "free"), *cards(10, 0.3, 0.2), *cards(10, 0.6, 0.5, "dear")]
    found = choose(fleet, rules)
    assert not found.feasible
    assert 1.5 * 0.9 <= found.cost_per_hour <= 1.5
    assert {"free0", "free1", "free2"} <= set(found.active)
    assert "the budget of 1.50 per hour pays for" in found.why
    assert "budget" in found.standby["dear0"]
    assert choose(fleet, replace(rules, budget_per_hour=0.0)).active == ("free0", "free1", "free2")


def test_within_the_budget_the_learner_is_idle_as_little_as_possible() -> None:
    fleet = random_fleet(9, Random(5))
    rules = Rules(budget_per_hour=1.0)
    found = choose(fleet, rules)
    assert found.cost_per_hour <= 1.0
    search = Search(demand(), fleet, by_downlink, rules)
    within = [s for s in (search.assess([w.name for w in c], 1.0) for c in subsets(fleet)) if s.cost_per_hour <= 1.0]
    best = max(selection.useful_rollouts_per_s for selection in within)
    assert found.useful_rollouts_per_s >= 0.98 * best


def test_the_broadcast_is_planned_for_the_set_that_is_chosen() -> None:
    """A star: each sampler more delays the version for all, so that each counts for less."""
    wanted, fleet = demand(max_staleness=1, groups=16), [worker(f"w{n}", 0.1, 0.2, places=2) for n in range(60)]
    found = Search(wanted, fleet, star(80e6), Rules()).select()
    assert found.feasible
    assert found.dissemination.install_s == (2.0 + len(found.active),) * len(found.active)
    assert found.has_margin
    free = Search(wanted, fleet, star(80e9), Rules()).select()
    assert len(found.active) > len(free.active)


def test_a_star_that_can_not_carry_enough_is_as_large_as_helps() -> None:
    wanted, fleet = demand(max_staleness=1), cards(200, 0.1, 0.2)
    found = Search(wanted, fleet, star(80e6), Rules()).select()
    assert not found.feasible
    search = Search(wanted, fleet, star(80e6), Rules())
    least = min(search.assess([w.name for w in fleet[:n]], 1.0).prediction.idle_share for n in range(1, 200))
    assert found.prediction.idle_share <= least + 0.03
    assert len(found.active) < 100


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"idle_target": 0.0}, "idle target"),
        ({"idle_target": 1.5}, "idle target"),
        ({"idle_target": math.nan}, "idle target"),
        ({"budget_per_hour": -1.0}, "budget"),
        ({"budget_per_hour": math.nan}, "budget"),
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rules(**wrong)


def test_a_thousand_samplers_are_chosen_from_in_few_plans() -> None:
    """A plan for a thousand takes hundredths of a second, and a decision comes with each version."""
    plans: list[int] = []

    def counted(workers: Sequence[Worker]) -> Dissemination:
        plans.append(len(workers))
        return by_downlink(workers)

    found = Search(demand(groups=2000, max_staleness=4), random_fleet(1000, Random(1)), counted, Rules()).select()
    assert found.feasible
    assert found.prediction.idle_share <= 0.02
    assert found.least_rollouts_per_s >= 2000 * 8 / 120
    assert len(plans) <= 8


def test_in_sequential_mode_the_set_is_near_the_least_idle_share() -> None:
    wanted, fleet = demand(groups=16, max_staleness=0), cards(24, 0.15, 0.2)
    found = Search(wanted, fleet, by_downlink, Rules()).select()
    assert not found.feasible
    assert "max_staleness" in found.why
    everybody = Search(wanted, fleet, by_downlink, Rules()).assess([one.name for one in fleet], 1.0)
    assert found.prediction.idle_share <= everybody.prediction.idle_share + 0.02
    assert len(found.active) < 24


def offers_of(*pairs: tuple[float, float]) -> list[PricedOffer]:
    """(price, rate) each, named by their place."""
    offers = [
        PricedOffer(name=str(number), price_per_hour=price, useful_rollouts_per_s=rate)
        for number, (price, rate) in enumerate(pairs)
    ]
    return sorted(offers, key=lambda offer: offer.ratio)


@pytest.mark.parametrize(
    ("pairs", "need", "chosen"),
    [([], 0.0, set()), ([(1.0, 1.0)], 0.0, set()), ([(1.0, 1.0)], 1.0, {"0"}), ([(1.0, 1.0)], 1.1, None)],
)
def test_known_cases(pairs: list[tuple[float, float]], need: float, chosen: set[str] | None) -> None:
    found = cover(offers_of(*pairs), need)
    assert (None if found is None else {offer.name for offer in found}) == chosen


def test_of_equal_sets_the_first_one_is_chosen() -> None:
    alike = offers_of(*[(1.0, 1.0)] * 6)
    assert cover(alike, 3.0) == tuple(alike[:3])
    assert cover(alike[::-1], 3.0) == tuple(alike[::-1][:3])


def test_a_large_fleet_is_near_its_relaxation() -> None:
    random = Random(1)
    rates = [random.uniform(0.1, 1.0) for _ in range(1000)]
    offers = offers_of(*[(rate * random.lognormvariate(0, 0.4), rate) for rate in rates])
    need = 0.3 * sum(rates)
    chosen = cover(offers, need)
    assert chosen is not None
    assert sum(offer.useful_rollouts_per_s for offer in chosen) >= need * (1 - 1e-6)
    least, left = 0.0, need
    for offer in offers:
        share = min(1.0, left / offer.useful_rollouts_per_s)
        least, left = least + share * offer.price_per_hour, left - share * offer.useful_rollouts_per_s
    assert sum(offer.price_per_hour for offer in chosen) <= 1.002 * least
