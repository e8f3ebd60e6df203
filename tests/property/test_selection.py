"""What holds of every prediction; the chosen set against the cheapest of all sets."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.pay.cover import ALL_SETS, cover
from swarm.pay.fleet import Lengths, Worker
from swarm.pay.model import predict
from swarm.pay.prices import PricedOffer
from swarm.pay.selection import Rules, Search
from tests.capacity import by_downlink, demand, random_fleet, subsets

MAX_EXCESS = 0.02

seeds = st.integers(0, 2**32)
lengths = st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=8).map(Lengths.of)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, count=st.integers(1, 6), step=st.tuples(*[st.integers(1, 6)] * 4), lengths=lengths)
def test_a_prediction_is_possible_and_the_same_again(
    seed: int, count: int, step: tuple[int, ...], lengths: Lengths
) -> None:
    random = Random(seed)
    fleet = [replace(one, lockstep=random.random() < 0.5) for one in random_fleet(count, random)]
    install_s = [random.uniform(0.5, 200.0) for _ in fleet]
    groups, size, bound, period = step
    wanted = demand(groups=4 * groups, group_size=size, max_staleness=bound - 1, period=min(period, bound))
    wanted = replace(wanted, lengths=lengths)
    told = predict(wanted, fleet, install_s)
    assert 0 <= told.idle_share < 1
    assert told.step_s >= wanted.train_step_s * (1 - 1e-9)
    assert told == predict(wanted, fleet, install_s)


def cheapest(fleet: list[Worker], groups: int, least: float) -> float | None:
    """The least price of a set that reaches `least` with a reserve of its own."""
    search = Search(demand(groups=groups), fleet, by_downlink, Rules())
    tried = (search.assess([one.name for one in chosen], least) for chosen in subsets(fleet) if chosen)
    return min((selection.cost_per_hour for selection in tried if selection.has_margin), default=None)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, count=st.integers(1, 9), share=st.floats(0.1, 1.1))
def test_a_choice_costs_at_most_two_percent_more_than_the_best(seed: int, count: int, share: float) -> None:
    check_choice(seed, count, share)


@pytest.mark.long
def test_so_it_does_of_fourteen() -> None:
    check_choice(seed=1, count=14, share=0.6)


def check_choice(seed: int, count: int, share: float) -> None:
    fleet = random_fleet(count, Random(seed))
    groups = max(1, round(share * sum(one.rollouts_per_s for one in fleet) * 120 / 8))
    found = Search(demand(groups=groups), fleet, by_downlink, Rules()).select()
    best = cheapest(fleet, groups, found.least_rollouts_per_s)
    if best is None:
        assert not found.has_margin
        assert len(found.active) == count or not found.feasible or found.prediction.idle_share <= 0.02
    else:
        assert found.has_margin
        assert found.feasible
        assert found.cost_per_hour <= best * (1 + MAX_EXCESS) + 1e-9


offers = st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), max_size=ALL_SETS)


@settings(deadline=None)
@given(drawn=offers, share=st.floats(0.001, 1.2))
def test_a_cover_is_the_cheapest(drawn: list[tuple[float, float]], share: float) -> None:
    ranked = sorted(
        (
            PricedOffer(name=str(number), price_per_hour=price, useful_rollouts_per_s=rate)
            for number, (price, rate) in enumerate(drawn)
        ),
        key=lambda offer: offer.ratio,
    )
    need = share * sum(rate for _, rate in drawn)
    found = cover(ranked, need)
    sets = [[o for place, o in enumerate(ranked) if chosen >> place & 1] for chosen in range(2 ** len(ranked))]
    prices = [
        sum(o.price_per_hour for o in chosen)
        for chosen in sets
        if sum(o.useful_rollouts_per_s for o in chosen) >= need * (1 - 1e-9)
    ]
    if found is None:
        assert prices == []
    else:
        assert sum(o.useful_rollouts_per_s for o in found) >= need * (1 - 1e-8)
        assert sum(o.price_per_hour for o in found) <= min(prices) * (1 + 1e-6) + 1e-9
