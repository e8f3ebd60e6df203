"""What samplers that wait are told: one line each, for a person."""

from __future__ import annotations

from collections.abc import Collection

from swarm.capacity.fleet import Worker
from swarm.capacity.market import Market
from swarm.capacity.prices import HOUR_S


def reasons(market: Market, active: Collection[str], *, budget_spent_per_hour: float | None) -> dict[str, str]:
    """Why each sampler that is not in `active` waits; the budget is given where it is what keeps them out."""
    chosen = frozenset(active)
    dearest = max((per_thousand(market, market.workers[name]) for name in active), default=0.0)
    useful = sum(market.offer(market.workers[name]).useful_rollouts_per_s for name in active)
    waiting = {}
    for name, worker in market.workers.items():
        if name in chosen:
            continue
        if useful > 0 and market.offer(worker).useful_rollouts_per_s == 0:
            install_s = market.way_of(worker).install_s
            waiting[name] = (
                f"a version takes {install_s:.0f} s to reach you: your rollouts would be too old to be trained on"
            )
        elif budget_spent_per_hour is not None:
            own = per_thousand(market, worker)
            waiting[name] = (
                f"the budget of {budget_spent_per_hour:.2f} per hour is spent; you cost {own:.2f} per 1,000 rollouts"
            )
        else:
            waiting[name] = _by_price(per_thousand(market, worker), dearest)
    return {**waiting, **market.refused}


def per_thousand(market: Market, worker: Worker) -> float:
    """Price of a thousand of its rollouts, useful or not."""
    return 1000 * market.price_per_hour(worker) / (worker.rollouts_per_s * HOUR_S)


def _by_price(own: float, dearest: float) -> str:
    if own > dearest:
        return f"at {own:.2f} per 1,000 rollouts you cost more than the samplers that suffice (at most {dearest:.2f})"
    return f"the active samplers suffice; at {own:.2f} per 1,000 rollouts you step in when some leave"
