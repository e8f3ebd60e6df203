"""The cheapest set that has the rate."""

from __future__ import annotations

from random import Random

import pytest

from swarm.pay.cover import cover
from swarm.pay.prices import PricedOffer


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
