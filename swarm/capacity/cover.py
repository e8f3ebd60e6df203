"""The cheapest set whose rates add up to what is needed: a knapsack turned round.

Depth first over the offers, cheapest per rate first, the next one always taken before it is left out: the first set
found is the greedy one. What is left is bounded below by buying it in fractions (the linear relaxation), so a branch
that can not save GAP is never entered. Small fleets are solved exactly up to GAP; large ones, whose greedy set is
within one sampler's price of the bound, up to the number of steps that is allowed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from swarm.capacity.prices import Offer

GAP = 0.001
"""Relative saving for which nobody looks on: far below what prices and rates are known to."""

MOST_STEPS = 20_000
"""Of the search: some 50 ms. In benchmarks.activation the excess over the optimum is then far below 2 %."""

ROUNDING = 1e-9
"""Relative error of a sum of rates that is taken for rounding."""


class Relaxation:
    """Offers in the order of their ratio, and what it costs at least to buy a rate from those at or after a place."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = offers
        self._rates = [0.0, *accumulate(offer.useful_rollouts_per_s for offer in offers)]
        self._prices = [0.0, *accumulate(offer.price_per_hour for offer in offers)]

    def left(self, first: int) -> float:
        """The summed rate of the offers from `first` on."""
        return self._rates[-1] - self._rates[first]

    def least_price(self, first: int, need: float) -> float:
        """Of `need`, which is at most `left(first)`, if the last sampler could be rented in part."""
        if need <= 0:
            return 0.0
        upto = min(bisect_left(self._rates, self._rates[first] + need, lo=first + 1), len(self._offers))
        lacking = need - (self._rates[upto - 1] - self._rates[first])
        return self._prices[upto - 1] - self._prices[first] + lacking * self._offers[upto - 1].ratio


def cover(offers: Sequence[Offer], need: float) -> tuple[Offer, ...] | None:
    """A cheapest set of `offers` with a summed rate of at least `need`; None if all together have less.

    `offers` ascend by ratio, and of equal sets the one that comes first is chosen: put those first that should stay.
    """
    relaxed = Relaxation(offers)
    need = max(0.0, need * (1.0 - ROUNDING))
    if relaxed.left(0) < need:
        return None
    least = relaxed.least_price(0, need)
    best: list[int] | None = None
    best_price = float("inf")
    taken: list[int] = []
    at, missing, price = 0, need, 0.0
    for _ in range(MOST_STEPS):
        if missing <= 0 and price < best_price:
            best, best_price = list(taken), price
            if best_price <= least * (1.0 + GAP):
                break
        if missing > 0 and relaxed.left(at) >= missing and _may_save(relaxed, at, missing, price, best_price):
            taken.append(at)
            missing -= offers[at].useful_rollouts_per_s
            price += offers[at].price_per_hour
            at += 1
            continue
        if not taken:
            break
        last = taken.pop()
        missing += offers[last].useful_rollouts_per_s
        price -= offers[last].price_per_hour
        at = _after_its_like(offers, last)
    return None if best is None else tuple(offers[i] for i in best)


def _may_save(relaxed: Relaxation, at: int, missing: float, price: float, best_price: float) -> bool:
    return price + relaxed.least_price(at, missing) < best_price * (1.0 - GAP)


def _after_its_like(offers: Sequence[Offer], left_out: int) -> int:
    """The place after one that was left out and all that are like it: taking one of those instead changes nothing."""
    at = left_out + 1
    same = (offers[left_out].price_per_hour, offers[left_out].useful_rollouts_per_s)
    while at < len(offers) and (offers[at].price_per_hour, offers[at].useful_rollouts_per_s) == same:
        at += 1
    return at
