"""The cheapest set whose rates add up to what is needed: a knapsack problem in reverse.

A greedy set is taken by price per rollout and completed by the offer that completes it most cheaply. It is then
improved as long as exchanging at most two offers for at most two others saves money. For a few offers all sets are
tried. benchmarks.activation measures how far the result is from the cheapest set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from swarm.capacity.prices import Offer, churn_reserve

ALL_SETS = 8  # Up to this many offers all sets are tried: 256
EXCHANGED = 10  # Offers considered for exchange: the dearest per rollout inside the set, and the cheapest outside
MAX_EXCHANGES = 100  # Each exchange saves money; a greedy set needs few
ROUNDING = 1e-9  # Relative error of a sum of rates that is put down to rounding


def cover(offers: Sequence[Offer], need: float, *, held: Sequence[Offer] = ()) -> tuple[Offer, ...] | None:
    """Return `held` and a cheap set of `offers` whose rates add up to at least `need` plus their churn_reserve, or None
    if all together fall short.

    `offers` ascend by ratio. Among equal sets the first one wins, so put offers that should stay first.
    """
    rate, variance = _rate(held) - need * (1.0 - ROUNDING), _variance(held)
    if not _is_enough((rate, variance), (), offers):
        return None
    if len(offers) <= ALL_SETS:
        sets = (chosen for size in range(len(offers) + 1) for chosen in combinations(offers, size))
        enough = [chosen for chosen in sets if _is_enough((rate, variance), (), chosen)]
        return (*held, *min(enough, key=lambda chosen: (_price(chosen), -_rate(chosen))))
    best = _greedy(offers, rate, variance)
    for _ in range(MAX_EXCHANGES):
        names = {offer.name for offer in best}
        outside = [offer for offer in offers if offer.name not in names][:EXCHANGED]
        whole = (rate + _rate(best), variance + _variance(best))
        found = next((pair for pair in _exchanges(best[-EXCHANGED:], outside) if _is_enough(whole, *pair)), None)
        if found is None:
            break
        gone, new = found
        best = [*(offer for offer in best if offer not in gone), *new]
        best.sort(key=lambda offer: offer.ratio)
    return (*held, *best)


def _greedy(offers: Sequence[Offer], rate: float, variance: float) -> list[Offer]:
    """Take the offers in order, but leave out each one that would complete the set. Return the cheapest set so
    completed."""
    taken: list[Offer] = []
    ends: list[tuple[float, int, int]] = []
    price = 0.0
    if _is_enough((rate, variance), (), ()):
        return taken
    for place, offer in enumerate(offers):
        if _is_enough((rate, variance), (), (offer,)):
            ends.append((price + offer.price_per_hour, len(taken), place))
            continue
        taken.append(offer)
        rate, variance = rate + offer.useful_rollouts_per_s, variance + offer.variance
        price += offer.price_per_hour
    _, count, place = min(ends)
    return [*taken[:count], offers[place]]


def _exchanges(
    inside: Sequence[Offer], outside: Sequence[Offer]
) -> Iterator[tuple[tuple[Offer, ...], tuple[Offer, ...]]]:
    """Yield exchanges of up to two of `inside` for up to two of `outside` that save money, the largest saving first."""
    pairs = [
        (gone, new)
        for gone in (*combinations(inside, 1), *combinations(inside, 2))
        for new in ((), *combinations(outside, 1), *combinations(outside, 2))
    ]
    saved = [(_price(gone) - _price(new), place) for place, (gone, new) in enumerate(pairs)]
    return (pairs[place] for saving, place in sorted(saved, key=lambda one: -one[0]) if saving > 0)


def _is_enough(whole: tuple[float, float], gone: Sequence[Offer], new: Sequence[Offer]) -> bool:
    rate, variance = whole
    return rate - _rate(gone) + _rate(new) >= churn_reserve(variance - _variance(gone) + _variance(new))


def _rate(offers: Sequence[Offer]) -> float:
    return sum(offer.useful_rollouts_per_s for offer in offers)


def _variance(offers: Sequence[Offer]) -> float:
    return sum(offer.variance for offer in offers)


def _price(offers: Sequence[Offer]) -> float:
    return sum(offer.price_per_hour for offer in offers)
