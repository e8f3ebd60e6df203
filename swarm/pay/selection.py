"""The cheapest set of samplers that keeps the learner busy.

Theory of operation. A set must reach R / T less the idle target, plus two margins: a share for errors of the estimates,
and a reserve for samplers that are missing at any time. Samplers are ranked by their price per useful rollout, and
cover.py searches for the cheapest set that reaches the rate. If the closed form says that the learner would wait for
that set all the same (long answers, few places), the rate is raised until it does not. If no rate is enough, as always
at S = 0, the smallest set is taken that comes within NEAR_LEAST of the least idle share.

How long a version takes depends on the set, and the set depends on how long a version takes. So the search plans,
chooses and plans again, at most MAX_ROUNDS times. A sampler outside the last planned set is assumed to fare like its
class (or like all samplers, if its class is not in the plan), limited by its own downlink.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from swarm.pay.cover import cover
from swarm.pay.fleet import Demand, Disseminate, Dissemination, Worker
from swarm.pay.model import Prediction, predict, shortfall
from swarm.pay.prices import (
    HOUR_S,
    PricedOffer,
    churn_reserve,
    churn_variance,
    fault_of,
    missing_share,
    price_per_hour,
    usable_share,
    waiting_share,
)


def reasons(market: Market, active: Collection[str], *, budget_spent_per_hour: float | None) -> dict[str, str]:
    """Return why each sampler outside `active` waits. `budget_spent_per_hour` is None unless the budget is why."""
    chosen = frozenset(active)
    dearest = max((per_thousand(market, market.workers[name]) for name in active), default=0.0)
    useful = sum(market.offer(market.workers[name]).useful_rollouts_per_s for name in active)
    waiting = {}
    for name, worker in market.workers.items():
        if name in chosen:
            continue
        if useful > 0 and market.offer(worker).useful_rollouts_per_s == 0:
            install_s = market.delivery_to(worker).install_s
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
    """Return the price of a thousand of its rollouts, useful or not."""
    return 1000 * market.price_per_hour(worker) / (worker.rollouts_per_s * HOUR_S)


def _by_price(own: float, dearest: float) -> str:
    if own > dearest:
        return f"at {own:.2f} per 1,000 rollouts you cost more than the samplers that suffice (at most {dearest:.2f})"
    return f"the active samplers suffice; at {own:.2f} per 1,000 rollouts you step in when some leave"


UNMEASURED = "your rate is not known yet: it is measured when your turn comes to be tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How one version reaches one sampler: seconds until it is installed, bytes received and bytes passed on."""

    install_s: float
    down_bytes: float
    up_bytes: float


NO_DELIVERY_KNOWN = Delivery(install_s=0.0, down_bytes=0.0, up_bytes=0.0)  # Until the first plan


class Market:
    """The samplers to choose from, and in `refused` why the others are excluded. Names are unique."""

    def __init__(
        self, demand: Demand, workers: Sequence[Worker], disseminate: Disseminate, *, kept: Collection[str]
    ) -> None:
        self.demand = demand
        self.refused: dict[str, str] = {}
        self.workers: dict[str, Worker] = {}
        for worker in workers:
            fault = fault_of(worker) or (UNMEASURED if worker.rollouts_per_s == 0 else None)
            if fault is None:
                self.workers[worker.name] = worker
            else:
                self.refused[worker.name] = fault
        self._disseminate = disseminate
        self._kept = frozenset(kept)
        self._deliveries: dict[str, Delivery] = {}
        self._typical: dict[str | None, Delivery] = {None: NO_DELIVERY_KNOWN}

    @property
    def versions_per_hour(self) -> float:
        """The rate of a learner that never waits."""
        return HOUR_S / self.demand.period_s

    def plan(self, names: Sequence[str]) -> Dissemination:
        """Plan how a version reaches this set."""
        if not names:
            return Dissemination(install_s=(), down_bytes=(), up_bytes=(), learner_up_bytes=0.0)
        return self._disseminate([self.workers[name] for name in names])

    def suppose(self, names: Sequence[str], plan: Dissemination) -> None:
        """Use `plan` from now on: as it is for its samplers, and its medians for the others."""
        by_class: dict[str | None, list[Delivery]] = {}
        for name, install_s, down, up in zip(names, plan.install_s, plan.down_bytes, plan.up_bytes, strict=True):
            delivery = self._deliveries[name] = Delivery(install_s=install_s, down_bytes=down, up_bytes=up)
            by_class.setdefault(self.workers[name].device_class, []).append(delivery)
            by_class.setdefault(None, []).append(delivery)
        self._typical.update({name: _median_delivery(members) for name, members in by_class.items()})

    def delivery_to(self, worker: Worker) -> Delivery:
        """Return the planned delivery, or an assumed one if no plan has included this worker."""
        if (known := self._deliveries.get(worker.name)) is not None:
            return known
        like = self._typical.get(worker.device_class, self._typical[None])
        if worker.downlink_bytes_per_s <= 0:
            return like
        own_s = like.down_bytes / worker.downlink_bytes_per_s
        return Delivery(install_s=max(like.install_s, own_s), down_bytes=like.down_bytes, up_bytes=like.up_bytes)

    def offers(self) -> list[PricedOffer]:
        """Return the offers of all who would contribute, cheapest per rollout first; among equals kept samplers first,
        then faster ones. If no sampler can be in time (S = 0), all of them offer, and those that delay a step less
        count for more."""
        offers = self._offers(waiting=False) or self._offers(waiting=True)
        return sorted(offers, key=lambda o: (o.ratio, o.name not in self._kept, -o.useful_rollouts_per_s, o.name))

    def _offers(self, *, waiting: bool) -> list[PricedOffer]:
        offers = [self.offer(worker, waiting=waiting) for worker in self.workers.values()]
        return [offer for offer in offers if offer.useful_rollouts_per_s > 0]

    def offer(self, worker: Worker, *, waiting: bool = False) -> PricedOffer:
        """Return the worker's offer. If `waiting`, assume a learner that waits for every version."""
        delivery = self.delivery_to(worker)
        share_of = waiting_share if waiting else usable_share
        present = worker.rollouts_per_s * share_of(self.demand, install_s=delivery.install_s, place_s=worker.place_s)
        missing = self.missing_share(worker)
        return PricedOffer(
            name=worker.name,
            price_per_hour=self.price_per_hour(worker),
            useful_rollouts_per_s=present * (1.0 - missing),
            variance=churn_variance(present, missing),
        )

    def price_per_hour(self, worker: Worker) -> float:
        delivery = self.delivery_to(worker)
        return price_per_hour(
            worker, down_bytes=delivery.down_bytes, up_bytes=delivery.up_bytes, versions_per_hour=self.versions_per_hour
        )

    def missing_share(self, worker: Worker) -> float:
        """A loss is noticed and decided upon within one publication period; then a replacement starts."""
        replace_s = worker.start_s + self.demand.period_s
        return missing_share(departures_per_hour=worker.departures_per_hour, replace_s=replace_s)


def _median_delivery(deliveries: Sequence[Delivery]) -> Delivery:
    return Delivery(
        install_s=median(delivery.install_s for delivery in deliveries),
        down_bytes=median(delivery.down_bytes for delivery in deliveries),
        up_bytes=median(delivery.up_bytes for delivery in deliveries),
    )


MAX_ROUNDS = 4
"""Rounds of planning and choosing. Two agree at once if links are not the limit; more only follow noise in the plan."""

HALVINGS = 5  # Of the ratio 2 between two rates of which only the higher is enough: the result is good to 2 %

NEAR_LEAST = 0.01
"""Idle share above the least possible that is accepted if the target cannot be met: more samplers would cost money and
hardly shorten the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the user wants.

    `budget_per_hour` covers samplers and their traffic, not the learner; it also holds with `activate` "all".
    `least_margin` is a share of the required rate, added for errors of the estimates.
    """

    activate: Literal["all", "cheapest"] = "cheapest"
    idle_target: float = 0.02
    budget_per_hour: float | None = None
    least_margin: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.idle_target < 1:
            raise ValueError(f"the idle target must be a share between 0 and 1, not {self.idle_target}")
        if self.budget_per_hour is not None and not self.budget_per_hour >= 0:
            raise ValueError(f"the budget per hour must be at least 0, not {self.budget_per_hour}")
        if not 0 <= self.least_margin < math.inf:
            raise ValueError(f"the margin must be at least 0, not {self.least_margin}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The active samplers and what they achieve.

    `feasible`: the predicted idle share, with all of them present, is within the target, and the cost is within the
    budget. `least_rollouts_per_s` is the rate that this choice aimed for, `needed_rollouts_per_s` that and the reserve;
    `useful_rollouts_per_s` is what the set delivers of it. All count only rollouts that arrive in time. `cost_per_hour`
    is rent, starts and the traffic of versions. `standby` says in one line why each other sampler waits; `why` explains
    the choice or the problem.
    """

    active: tuple[str, ...]
    cost_per_hour: float
    prediction: Prediction
    dissemination: Dissemination
    useful_rollouts_per_s: float
    least_rollouts_per_s: float
    needed_rollouts_per_s: float
    standby: dict[str, str]
    feasible: bool
    why: str

    @property
    def has_margin(self) -> bool:
        return self.useful_rollouts_per_s >= self.needed_rollouts_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A set and its plan. In `useful_rollouts_per_s` each sampler is missing for its share of the time."""

    names: tuple[str, ...]
    dissemination: Dissemination
    price_per_hour: float
    useful_rollouts_per_s: float
    reserve_rollouts_per_s: float


class Search:
    """One choice among these workers. Among equal choices, samplers in `kept` stay. Workers' names are unique; those
    with an unknown rate (0) or impossible figures are not chosen, and `standby` says so. Caches plans."""

    def __init__(
        self,
        demand: Demand,
        workers: Sequence[Worker],
        disseminate: Disseminate,
        rules: Rules,
        *,
        kept: Collection[str] = (),
    ) -> None:
        self._demand = demand
        self._rules = rules
        self._market = Market(demand, workers, disseminate, kept=kept)
        self._trials: dict[tuple[str, ...], Trial] = {}

    def select(self, *, fixed: Collection[str] = (), more_margin: float = 0.0) -> Selection:
        """Return the set to activate. It includes `fixed` unless the budget forbids it. `more_margin` is added to the
        rules' own."""
        busy = 1.0 - self._rules.idle_target
        margin = 1.0 + self._rules.least_margin + more_margin
        least = busy * margin * self._demand.rollouts_per_step / self._demand.train_step_s
        if self._rules.activate == "all" or not self._market.workers:
            return self._afforded(self.assess(self._market.workers, least))
        tried = [self._reaching(least, fixed)]
        while not self._is_busy(tried[-1]) and len(tried[-1].active) < len(self._market.offers()):
            tried.append(self._reaching(2 * tried[-1].least_rollouts_per_s, fixed))
        goal = self._rules.idle_target
        if not any(map(self._is_busy, tried)):
            goal = min(one.prediction.idle_share for one in tried) + NEAR_LEAST
        enough = next(i for i, one in enumerate(tried) if one.prediction.idle_share <= goal)
        found = tried[enough]
        if enough:
            found = self._smaller(tried[enough - 1].least_rollouts_per_s, found, goal, fixed)
        return self._afforded(found)

    def assess(self, names: Collection[str], least: float) -> Selection:
        """Return the figures of exactly this set, without workers that cannot be chosen, whatever it costs, where the
        useful rate `least` is aimed for."""
        trial = self._try([name for name in names if name in self._market.workers])
        selection = self._selection(trial, least)
        return replace(selection, standby=self._reasons(selection))

    # -- the cheapest set -------------------------------------------------------------------------------------

    def _is_busy(self, selection: Selection) -> bool:
        return selection.prediction.idle_share <= self._rules.idle_target

    def _smaller(self, too_low: float, found: Selection, goal: float, fixed: Collection[str]) -> Selection:
        """Return a set of a lower rate than `found` that reaches the goal. A rate `too_low` is not enough."""
        for _ in range(HALVINGS):
            tried = self._reaching(math.sqrt(too_low * found.least_rollouts_per_s), fixed)
            if tried.prediction.idle_share <= goal:
                found = tried
            else:
                too_low = tried.least_rollouts_per_s
        return found

    def _reaching(self, least: float, fixed: Collection[str]) -> Selection:
        """Plan and choose until the choice is stable. Return all who contribute if they are too slow together."""
        trials: list[Trial] = []
        for _ in range(MAX_ROUNDS):
            offers = self._market.offers()
            held = [offer for offer in offers if offer.name in fixed]
            chosen = cover([offer for offer in offers if offer.name not in fixed], least, held=held)
            names = tuple(sorted(offer.name for offer in (offers if chosen is None else chosen)))
            if trials and trials[-1].names == names:
                break
            trials.append(self._try(names))
        best = min(
            trials, key=lambda one: (one.useful_rollouts_per_s < least + one.reserve_rollouts_per_s, one.price_per_hour)
        )
        return self._selection(self._try(best.names), least)

    # -- the budget -------------------------------------------------------------------------------------------

    def _afforded(self, wanted: Selection) -> Selection:
        """Return `wanted` if the budget allows it, else the most useful set within the budget."""
        budget = self._rules.budget_per_hour
        selection = wanted
        if budget is not None and wanted.cost_per_hour > budget:
            selection = self._within(budget, wanted)
        self._try(selection.active)
        return replace(selection, standby=self._reasons(selection))

    def _within(self, budget: float, wanted: Selection) -> Selection:
        """Leave out the least useful set that makes the rest cheap enough: a cover with price and rate swapped."""
        allowed = budget
        trial = self._try(())
        for _ in range(MAX_ROUNDS):
            offers = self._market.offers()
            swapped = [
                PricedOffer(name=o.name, price_per_hour=o.useful_rollouts_per_s, useful_rollouts_per_s=o.price_per_hour)
                for o in reversed(offers)
                if o.price_per_hour > 0
            ]
            excess = sum(offer.price_per_hour for offer in offers) - allowed
            dropped = cover(swapped, excess)
            left_out = {offer.name for offer in (swapped if dropped is None else dropped)}
            found = self._try([offer.name for offer in offers if offer.name not in left_out])
            if found.price_per_hour <= budget:
                trial = found if found.useful_rollouts_per_s >= trial.useful_rollouts_per_s else trial
                break
            allowed *= budget / found.price_per_hour
        selection = self._selection(trial, wanted.least_rollouts_per_s)
        why = (
            f"the budget of {budget:.2f} per hour pays for samplers that keep the learner idle"
            f" {selection.prediction.idle_share:.0%} of the time; {wanted.prediction.idle_share:.0%} would cost"
            f" {wanted.cost_per_hour:.2f}"
        )
        return replace(selection, feasible=False, why=why)

    # -- sets -------------------------------------------------------------------------------------------------

    def _try(self, names: Collection[str]) -> Trial:
        """Plan for this set, or return its cached plan. Others' installs are supposed to be like these from now on."""
        key = tuple(sorted(names))
        if key not in self._trials:
            self._trials[key] = self._planned(key, self._market.plan(key))
        self._market.suppose(key, self._trials[key].dissemination)
        return self._trials[key]

    def _planned(self, names: tuple[str, ...], plan: Dissemination) -> Trial:
        self._market.suppose(names, plan)
        offers = [self._market.offer(self._market.workers[name]) for name in names]
        return Trial(
            names=names,
            dissemination=plan,
            price_per_hour=sum(offer.price_per_hour for offer in offers),
            useful_rollouts_per_s=sum(offer.useful_rollouts_per_s for offer in offers),
            reserve_rollouts_per_s=churn_reserve(sum(offer.variance for offer in offers)),
        )

    # -- words ------------------------------------------------------------------------------------------------

    def _selection(self, trial: Trial, least: float) -> Selection:
        chosen = [self._market.workers[name] for name in trial.names]
        prediction = predict(self._demand, chosen, trial.dissemination.install_s)
        feasible = prediction.idle_share <= self._rules.idle_target
        needed = least + trial.reserve_rollouts_per_s
        return Selection(
            active=trial.names,
            cost_per_hour=trial.price_per_hour,
            prediction=prediction,
            dissemination=trial.dissemination,
            useful_rollouts_per_s=trial.useful_rollouts_per_s,
            least_rollouts_per_s=least,
            needed_rollouts_per_s=needed,
            standby={},
            feasible=feasible,
            why=self._why(trial, needed) if feasible else self._shortfall(trial, prediction, needed),
        )

    def _why(self, trial: Trial, needed: float) -> str:
        return (
            f"{len(trial.names)} of {len(self._market.workers)} samplers give {trial.useful_rollouts_per_s:.3g}"
            f" rollouts/s in time where {needed:.3g} are needed with margins, at {trial.price_per_hour:.2f} per hour"
        )

    def _shortfall(self, trial: Trial, prediction: Prediction, needed: float) -> str:
        idle = f"the learner will be idle {prediction.idle_share:.0%} of the time"
        if not trial.names:
            return f"{idle}: no sampler with a known rate is there"
        chosen = [self._market.workers[name] for name in trial.names]
        rate = sum(worker.rollouts_per_s for worker in chosen)
        generation_s = sum(worker.place_s * worker.rollouts_per_s for worker in chosen) / rate
        fails = shortfall(self._demand, broadcast_s=trial.dissemination.broadcast_s, generation_s=generation_s)
        if fails is not None:
            return f"{idle}: {fails}"
        return f"{idle}: {trial.useful_rollouts_per_s:.3g} rollouts/s in time, {needed:.3g} are needed with margins"

    def _reasons(self, selection: Selection) -> dict[str, str]:
        spent = None if selection.feasible else self._rules.budget_per_hour
        return reasons(self._market, selection.active, budget_spent_per_hour=spent)
