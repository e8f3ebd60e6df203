"""The cheapest set whose rates add up to what is needed: a knapsack turned round.

The greedy set by price per rollout, ended by the offer that ends it cheapest, is improved for as long as an exchange of
at most two offers for at most two others saves anything. Few offers are solved by looking at all their sets.
benchmarks.activation measures how far the result is from the cheapest set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from swarm.pay.prices import PricedOffer, churn_reserve

ALL_SETS = 8  # Up to this many offers all sets are tried: 256
EXCHANGED = 10  # Offers considered for exchange: the dearest per rollout inside the set, and the cheapest outside
MAX_EXCHANGES = 100  # Each exchange saves money; a greedy set needs few
ROUNDING = 1e-9  # Relative error of a sum of rates that is put down to rounding


class OfferSums(NamedTuple):
    """Offers, and what they come to."""

    offers: tuple[PricedOffer, ...]
    price: float
    rate: float
    variance: float

    def and_also(self, offers: Iterable[PricedOffer]) -> OfferSums:
        offers = tuple(offers)
        return OfferSums(
            self.offers + offers,
            self.price + sum(one.price_per_hour for one in offers),
            self.rate + sum(one.useful_rollouts_per_s for one in offers),
            self.variance + sum(one.variance for one in offers),
        )

    @property
    def is_enough(self) -> bool:
        return self.rate >= churn_reserve(self.variance)


NOTHING = OfferSums((), 0.0, 0.0, 0.0)


def cover(
    offers: Sequence[PricedOffer], need: float, *, held: Sequence[PricedOffer] = ()
) -> tuple[PricedOffer, ...] | None:
    """Return `held` and a cheap set of `offers` whose rates add up to at least `need` plus their churn_reserve, or None
    if all together fall short.

    `offers` ascend by ratio. Among equal sets the first one wins, so put offers that should stay first.
    """
    start = NOTHING._replace(rate=-need * (1.0 - ROUNDING)).and_also(held)
    if not start.and_also(offers).is_enough:
        return None
    if len(offers) <= ALL_SETS:
        sets = [start]
        for offer in offers:
            sets += [one.and_also((offer,)) for one in sets]
        return min((one for one in sets if one.is_enough), key=lambda one: (one.price, -one.rate)).offers
    best = _greedy(offers, start)
    for _ in range(MAX_EXCHANGES):
        found = _exchange(best, offers, start)
        if found is None:
            break
        gone, new = found
        best = sorted((*(offer for offer in best if offer not in gone), *new), key=lambda offer: offer.ratio)
    return (*held, *best)


def _greedy(offers: Sequence[PricedOffer], start: OfferSums) -> list[PricedOffer]:
    """Take the offers in order, but leave out each one that would complete the set. Return the cheapest set so
    completed."""
    taken: list[PricedOffer] = []
    ends: list[tuple[float, int, int]] = []
    if start.is_enough:
        return taken
    for place, offer in enumerate(offers):
        grown = start.and_also((offer,))
        if grown.is_enough:
            ends.append((grown.price, len(taken), place))
        else:
            taken.append(offer)
            start = grown
    _, count, place = min(ends)
    return [*taken[:count], offers[place]]


def _exchange(
    best: Sequence[PricedOffer], offers: Sequence[PricedOffer], start: OfferSums
) -> tuple[tuple[PricedOffer, ...], tuple[PricedOffer, ...]] | None:
    """Return up to two of `best`, and up to two others for them, whose exchange saves most and leaves enough."""
    names = {offer.name for offer in best}
    outside = [offer for offer in offers if offer.name not in names][:EXCHANGED]
    going = [NOTHING.and_also(pair) for size in (1, 2) for pair in combinations(best[-EXCHANGED:], size)]
    coming = [NOTHING.and_also(pair) for size in (0, 1, 2) for pair in combinations(outside, size)]
    _, _, rate, variance = start.and_also(best)
    most_saved, found = 0.0, None
    for gone, gone_price, gone_rate, gone_variance in going:
        for new, new_price, new_rate, new_variance in coming:
            saved = gone_price - new_price
            if saved > most_saved and (
                rate - gone_rate + new_rate >= churn_reserve(variance - gone_variance + new_variance)
            ):
                most_saved, found = saved, (gone, new)
    return found
