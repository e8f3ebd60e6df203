"""The cheapest set whose rates add up to what is needed: a knapsack turned round.

Depth first over the offers, cheapest per rate first, the next one always taken before it is left out: the first set
found is the greedy one. What is left is bounded below by buying it in fractions (the linear relaxation), so a branch
that can not save GAP is never entered. Small fleets are solved exactly up to GAP; large ones, whose greedy set is
within one sampler's price of the bound, up to the number of steps that is allowed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from swarm.capacity.prices import Offer, churn_reserve

GAP = 0.001  # Relative saving for which nobody looks on: far below what prices and rates are known to
MAX_STEPS = 5_000  # Of the search: some 20 ms. Four times as many gave the same excess in benchmarks.activation.

EXACT_OFFERS = 24
"""Offers up to which a search does not end before it has looked everywhere: beyond, all good sets are alike."""

ROUNDING = 1e-9  # Relative error of a sum of rates that is taken for rounding


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


def cover(offers: Sequence[Offer], need: float, *, held: Sequence[Offer] = ()) -> tuple[Offer, ...] | None:
    """`held` and a cheapest set of `offers` with a summed rate of at least `need` and their churn_reserve; None if all
    together have less.

    `offers` ascend by ratio, and of equal sets the one that comes first is chosen: put those first that should stay.
    """
    branch = _Branch(offers, need * (1.0 - ROUNDING), held)
    best: tuple[Offer, ...] | None = None
    best_price = math.inf
    for _ in range(MAX_STEPS):
        if branch.missing <= 0 and branch.price < best_price:
            best, best_price = (*held, *branch.taken), branch.price
            if branch.is_near_least():
                break
        if branch.may_go_on(best_price):
            branch.take()
        elif not branch.leave_out():
            break
    return best


class _Branch:
    """Where the search is: offers that are taken, in order; what is missing then; the next one that may be."""

    def __init__(self, offers: Sequence[Offer], need: float, held: Sequence[Offer]) -> None:
        self._offers = offers
        self._relaxed = Relaxation(offers)
        self._behind = _behind_likes(offers)
        self._places: list[int] = []
        self._at = 0
        self._lacking = need - sum(offer.useful_rollouts_per_s for offer in held)
        self._variance = sum(offer.variance for offer in held)
        self._whole = self._lacking
        self.price = 0.0

    @property
    def taken(self) -> list[Offer]:
        return [self._offers[place] for place in self._places]

    @property
    def missing(self) -> float:
        """Rate that is still to be taken, at least: more offers make the reserve larger, never smaller."""
        return self._lacking + churn_reserve(self._variance)

    def may_go_on(self, best_price: float) -> bool:
        """Whether taking more may lead to a set that saves GAP of `best_price`."""
        missing = self.missing
        if missing <= 0 or self._relaxed.left(self._at) < missing:
            return False
        return self.price + self._relaxed.least_price(self._at, missing) < best_price * (1.0 - GAP)

    def is_near_least(self) -> bool:
        """Whether this set is within GAP of what any would cost, supposing of a large fleet that any such set needs
        about the same reserve."""
        reserve = churn_reserve(self._variance) if len(self._offers) > EXACT_OFFERS else 0.0
        need = min(self._whole + reserve, self._relaxed.left(0))
        return self.price <= self._relaxed.least_price(0, need) * (1.0 + GAP)

    def take(self) -> None:
        """The next offer."""
        offer = self._offers[self._at]
        self._places.append(self._at)
        self._at += 1
        self._lacking -= offer.useful_rollouts_per_s
        self._variance += offer.variance
        self.price += offer.price_per_hour

    def leave_out(self) -> bool:
        """The offer that was taken last, and go on behind it and its like; False if none is left."""
        if not self._places:
            return False
        place = self._places.pop()
        offer = self._offers[place]
        self._lacking += offer.useful_rollouts_per_s
        self._variance -= offer.variance
        self.price -= offer.price_per_hour
        self._at = self._behind[place]
        return True


def _behind_likes(offers: Sequence[Offer]) -> list[int]:
    """For each offer, the place after it and all that follow and are like it: when it is left out, taking one of those
    instead changes nothing."""
    behind = [len(offers)] * len(offers)
    for at in reversed(range(len(offers) - 1)):
        alike = _figures(offers[at + 1]) == _figures(offers[at])
        behind[at] = behind[at + 1] if alike else at + 1
    return behind


def _figures(offer: Offer) -> tuple[float, float, float]:
    return (offer.price_per_hour, offer.useful_rollouts_per_s, offer.variance)
