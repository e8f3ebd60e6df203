"""The cheapest set of samplers that keeps the learner busy.

Theory of operation. A set must reach the model's least rate (`mu_min`, which depends on the lengths, the places and the
install times of the set) plus two margins: a share for errors of the estimates, and a reserve for samplers that are
missing at any time. Samplers are ranked by their price per useful rollout, and cover.py searches for the cheapest set
that reaches the rate.

How long a version takes depends on the set, and the set depends on how long a version takes. So the search plans,
chooses and plans again, at most MAX_ROUNDS times. Among the sets that reach the rate by their own plan, the cheapest
wins. A sampler outside the last planned set is assumed to fare like its class (or like all samplers, if its class is
not in the plan), limited by its own downlink. If no set meets the target, as always at S = 0, the search aims for at
most NEAR_LEAST above the least possible idle share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, Protocol

import swarm.capacity.model as capacity_model
from swarm.capacity.cover import cover
from swarm.capacity.fleet import Demand, Disseminate, Dissemination, Worker
from swarm.capacity.model import Prediction
from swarm.capacity.prices import (
    HOUR_S,
    Offer,
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
        return HOUR_S / (self.demand.publish_every_steps * self.demand.train_step_s)

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

    def offers(self) -> list[Offer]:
        """Return the offers of all who would contribute, cheapest per rollout first; among equals kept samplers first,
        then faster ones. If nobody can be in time (S = 0), all offer, and count for more the less they delay a step."""
        offers = self._offers(waiting=False) or self._offers(waiting=True)
        return sorted(offers, key=lambda o: (o.ratio, o.name not in self._kept, -o.useful_rollouts_per_s, o.name))

    def _offers(self, *, waiting: bool) -> list[Offer]:
        offers = [self.offer(worker, waiting=waiting) for worker in self.workers.values()]
        return [offer for offer in offers if offer.useful_rollouts_per_s > 0]

    def offer(self, worker: Worker, *, waiting: bool = False) -> Offer:
        """Return the worker's offer. If `waiting`, assume a learner that waits for every version."""
        delivery = self.delivery_to(worker)
        share_of = waiting_share if waiting else usable_share
        present = worker.rollouts_per_s * share_of(self.demand, install_s=delivery.install_s, place_s=worker.place_s)
        missing = self.missing_share(worker)
        return Offer(
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
        period_s = self.demand.publish_every_steps * self.demand.train_step_s
        return missing_share(departures_per_hour=worker.departures_per_hour, replace_s=worker.start_s + period_s)


def _median_delivery(deliveries: Sequence[Delivery]) -> Delivery:
    return Delivery(
        install_s=median(delivery.install_s for delivery in deliveries),
        down_bytes=median(delivery.down_bytes for delivery in deliveries),
        up_bytes=median(delivery.up_bytes for delivery in deliveries),
    )


MAX_ROUNDS = 6
"""Rounds of planning and choosing. Two agree at once if links are not the limit; more only follow noise in the plan."""

MAX_TRIMS = 3  # How many times a set that has too much by its own plan is made smaller
MAX_EFFORTS = 4  # How many times a set is chosen for the rate that the model asks for, or slightly more

EFFORT_STEP = 1.05  # Factor on the required rate if the model finds that a set which reaches it still falls short

NEAR_LEAST = 0.01
"""Idle share above the least possible that is accepted if the target cannot be met: more samplers would cost money and
hardly shorten the step."""

KEPT_EXCESS = 0.005
"""How much more than the cheapest set, as a share, the active one may cost and still stay: figures are less precise."""

SHRINK = 0.5  # Ratio between the set sizes that are tried for the least idle share


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


class Model(Protocol):
    """The part of swarm.capacity.model that selection uses."""

    def predict(self, demand: Demand, workers: Sequence[Worker], install_s: Sequence[float], /) -> Prediction: ...

    def mu_min(
        self, demand: Demand, workers: Sequence[Worker], install_s: Sequence[float], /, *, idle_target: float
    ) -> float: ...

    def shortfall(self, demand: Demand, /, *, broadcast_s: float, generation_s: float) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The active samplers and what they achieve.

    `feasible`: the predicted idle share, with all of them present, is within the target, and the cost is within the
    budget. `needed_rollouts_per_s` includes the margins; `useful_rollouts_per_s` is what the set delivers of it. Both
    count only rollouts that arrive in time. `idle_goal` is the target, or the goal that replaced it because the target
    cannot be met. `effort` is the rate needed for that goal without margins, divided by R / T. `cost_per_hour` is rent,
    starts and the traffic of versions. `standby` says in one line why each other sampler waits; `why` explains the
    choice or the problem.
    """

    active: tuple[str, ...]
    cost_per_hour: float
    prediction: Prediction
    dissemination: Dissemination
    useful_rollouts_per_s: float
    needed_rollouts_per_s: float
    effort: float
    idle_goal: float
    standby: dict[str, str]
    feasible: bool
    why: str

    @property
    def has_margin(self) -> bool:
        return self.useful_rollouts_per_s >= self.needed_rollouts_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A set and its plan. `present_rollouts_per_s` is its useful rate while all are present; in `useful_rollouts_per_s`
    each sampler is missing for its share of the time."""

    names: tuple[str, ...]
    dissemination: Dissemination
    price_per_hour: float
    present_rollouts_per_s: float

    useful_rollouts_per_s: float

    reserve_rollouts_per_s: float


class Search:
    """One choice among these workers. Among equal choices, samplers in `kept` stay. Workers' names are unique; those
    with an unknown rate (0) or impossible figures are not chosen, and `standby` says so. Caches plans and predictions.
    """

    def __init__(
        self,
        demand: Demand,
        workers: Sequence[Worker],
        disseminate: Disseminate,
        rules: Rules,
        *,
        kept: Collection[str] = (),
        model: Model = capacity_model,
    ) -> None:
        self._demand = demand
        self._rules = rules
        self._model = model
        self._market = Market(demand, workers, disseminate, kept=kept)
        self._kept = tuple(name for name in kept if name in self._market.workers)
        self._goal = rules.idle_target
        self._trials: dict[tuple[str, ...], Trial] = {}
        self._predictions: dict[tuple[str, ...], Prediction] = {}

    @property
    def base_rollouts_per_s(self) -> float:
        """R / T."""
        return self._demand.rollouts_per_step / self._demand.train_step_s

    def select(self, *, fixed: Collection[str] = (), after: Selection | None = None) -> Selection:
        """Return the set to activate. It includes `fixed` unless the budget forbids it. The goal and effort of the
        earlier selection `after` save asking the model; they are dropped if the model predicts that they fall short."""
        if after is not None and math.isinf(after.effort):
            after = None
        if self._rules.activate == "all" or not self._market.workers:
            return self._afforded(self.assess(tuple(self._market.workers), after=after))
        found = None
        if after is not None:
            self._goal = after.idle_goal
            found = self._as_before(fixed, after.effort)
        if found is None:
            self._goal = self._rules.idle_target
            found = self._cheapest(fixed)
        if found is None:
            ranked = self._aim_lower(fixed)
            found = self._cheapest(fixed) or self._smallest(ranked, least=sum(name in fixed for name in ranked))
        return self._afforded(found)

    def assess(self, names: Collection[str], *, after: Selection | None = None) -> Selection:
        """Return the figures of exactly this set, without workers that cannot be chosen, whatever it costs. The
        required rate comes from `after` if it is given, else from the model."""
        trial = self._try([name for name in names if name in self._market.workers])
        selection = self._selection(trial, self._effort(trial) if after is None else after.effort)
        return replace(selection, standby=self._reasons(selection))

    # -- the cheapest set that meets the target --------------------------------------------------------------

    def _as_before(self, fixed: Collection[str], effort: float) -> Selection | None:
        trial = self._settle(effort, fixed) or self._try([offer.name for offer in self._market.offers()])
        return self._found(trial, effort) if self._meets(trial) else None

    def _cheapest(self, fixed: Collection[str]) -> Selection | None:
        trial = self._settle(1.0, fixed)
        effort = self._effort(trial or self._try(self._market.workers))
        for _ in range(MAX_EFFORTS):
            trial = self._settle(effort, fixed) if math.isfinite(effort) else None
            if trial is None:
                return None
            if self._meets(trial):
                return self._found(trial, effort)
            effort *= EFFORT_STEP
        return None

    def _found(self, cheapest: Trial, effort: float) -> Selection:
        """Return the set that is active already instead of `cheapest` if it reaches the rate and costs hardly more."""
        kept = self._try(self._kept)
        if (
            self._is_enough(kept, effort)
            and kept.price_per_hour <= cheapest.price_per_hour * (1.0 + KEPT_EXCESS)
            and self._meets(kept)
        ):
            return self._selection(kept, effort)
        return self._selection(cheapest, effort)

    def _settle(self, effort: float, fixed: Collection[str]) -> Trial | None:
        """Plan and choose until the choice is stable. Return None if all samplers together are too slow."""
        best: Trial | None = None
        names: tuple[str, ...] | None = None
        for _ in range(MAX_ROUNDS):
            chosen = self._choose(self._least(effort), fixed)
            if chosen is None or chosen == names:
                break
            names = chosen
            trial = self._try(names)
            if self._is_enough(trial, effort) and (best is None or trial.price_per_hour < best.price_per_hour):
                best = trial
        return best and self._trimmed(best, effort, fixed)

    def _trimmed(self, trial: Trial, effort: float, fixed: Collection[str]) -> Trial:
        """Drop samplers that this set does not need by its own plan: if plans differ from set to set, the rounds may
        end at a set with too many."""
        for _ in range(MAX_TRIMS):
            trial = self._try(trial.names)
            names = self._choose(self._least(effort), fixed, among=trial.names)
            fewer = trial if names is None else self._try(names)
            if fewer.price_per_hour >= trial.price_per_hour or not self._is_enough(fewer, effort):
                break
            trial = fewer
        return self._try(trial.names)

    def _is_enough(self, trial: Trial, effort: float) -> bool:
        return trial.useful_rollouts_per_s >= self._needed(trial, effort)

    def _choose(
        self, need: float, fixed: Collection[str], *, among: Collection[str] | None = None
    ) -> tuple[str, ...] | None:
        offers = [offer for offer in self._market.offers() if among is None or offer.name in among]
        held = [offer for offer in offers if offer.name in fixed]
        chosen = cover([offer for offer in offers if offer.name not in fixed], need, held=held)
        return None if chosen is None else tuple(sorted(offer.name for offer in chosen))

    def _meets(self, trial: Trial) -> bool:
        return self._predict(trial).idle_share <= self._goal

    # -- where the target can not be met ----------------------------------------------------------------------

    def _aim_lower(self, fixed: Collection[str]) -> list[str]:
        """Set the goal to NEAR_LEAST above the least possible idle share. Return the contributing samplers, ranked."""
        offers = self._market.offers()
        ranked = [o.name for o in offers if o.name in fixed] + [o.name for o in offers if o.name not in fixed]
        least = min(self._idle_of(ranked, size) for size in _sizes(len(ranked)))
        self._goal = max(self._rules.idle_target, least + NEAR_LEAST)
        return ranked

    def _smallest(self, ranked: Sequence[str], *, least: int) -> Selection:
        """Return the smallest prefix of `ranked` that reaches the goal, with at least `least` samplers."""
        sizes = _sizes(len(ranked))
        enough = min(size for size in sizes if self._idle_of(ranked, size) <= self._goal)
        too_few = max((size for size in sizes if size < enough), default=0)
        while enough - too_few > max(1, enough // 50):
            middle = (enough + too_few) // 2
            if self._idle_of(ranked, middle) <= self._goal:
                enough = middle
            else:
                too_few = middle
        trial = self._try(ranked[: max(enough, least)])
        return self._selection(trial, self._effort(trial))

    def _idle_of(self, ranked: Sequence[str], size: int) -> float:
        return self._predict(self._try(ranked[:size])).idle_share

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
                Offer(name=o.name, price_per_hour=o.useful_rollouts_per_s, useful_rollouts_per_s=o.price_per_hour)
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
        selection = self._selection(trial, wanted.effort)
        why = (
            f"the budget of {budget:.2f} per hour pays for samplers that keep the learner idle"
            f" {selection.prediction.idle_share:.0%} of the time; {wanted.prediction.idle_share:.0%} would cost"
            f" {wanted.cost_per_hour:.2f}"
        )
        return replace(selection, feasible=False, why=why)

    # -- sets -------------------------------------------------------------------------------------------------

    def _try(self, names: Collection[str]) -> Trial:
        """Plan for this set, or return its cached plan."""
        key = tuple(sorted(names))
        if key not in self._trials:
            self._trials[key] = self._planned(key, self._market.plan(key))
        self._market.suppose(key, self._trials[key].dissemination)
        return self._trials[key]

    def _planned(self, names: tuple[str, ...], plan: Dissemination) -> Trial:
        self._market.suppose(names, plan)
        chosen = [self._market.workers[name] for name in names]
        offers = [self._market.offer(worker) for worker in chosen]
        useful = [offer.useful_rollouts_per_s for offer in offers]
        present = (rate / (1.0 - self._market.missing_share(one)) for rate, one in zip(useful, chosen, strict=True))
        return Trial(
            names=names,
            dissemination=plan,
            price_per_hour=sum(offer.price_per_hour for offer in offers),
            present_rollouts_per_s=sum(present),
            useful_rollouts_per_s=sum(useful),
            reserve_rollouts_per_s=churn_reserve(sum(offer.variance for offer in offers)),
        )

    def _needed(self, trial: Trial, effort: float) -> float:
        return self._least(effort) + trial.reserve_rollouts_per_s

    def _least(self, effort: float) -> float:
        """Return the required rate with the margin for errors, without the reserve."""
        return effort * self.base_rollouts_per_s * (1.0 + self._rules.least_margin)

    def _effort(self, trial: Trial) -> float:
        """Return the useful rate that the model needs of such samplers, over R / T; inf if no number suffices."""
        chosen = [self._market.workers[name] for name in trial.names]
        rate = sum(worker.rollouts_per_s for worker in chosen)
        if trial.present_rollouts_per_s == 0:
            return math.inf
        install_s = trial.dissemination.install_s
        least = self._model.mu_min(self._demand, chosen, install_s, idle_target=self._goal)
        return least / rate * trial.present_rollouts_per_s / self.base_rollouts_per_s

    def _predict(self, trial: Trial) -> Prediction:
        if trial.names not in self._predictions:
            chosen = [self._market.workers[name] for name in trial.names]
            found = self._model.predict(self._demand, chosen, trial.dissemination.install_s)
            self._predictions[trial.names] = found
        return self._predictions[trial.names]

    # -- words ------------------------------------------------------------------------------------------------

    def _selection(self, trial: Trial, effort: float) -> Selection:
        prediction = self._predict(trial)
        feasible = prediction.idle_share <= self._rules.idle_target
        needed = self._needed(trial, effort)
        return Selection(
            active=trial.names,
            cost_per_hour=trial.price_per_hour,
            prediction=prediction,
            dissemination=trial.dissemination,
            useful_rollouts_per_s=trial.useful_rollouts_per_s,
            needed_rollouts_per_s=needed,
            effort=effort,
            idle_goal=self._goal,
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
        broadcast_s = trial.dissemination.broadcast_s
        fails = self._model.shortfall(self._demand, broadcast_s=broadcast_s, generation_s=generation_s)
        if fails is not None:
            return f"{idle}: {fails}"
        if math.isinf(needed):
            return f"{idle}: samplers like these would not do in any number"
        return f"{idle}: {trial.useful_rollouts_per_s:.3g} rollouts/s in time, {needed:.3g} are needed with margins"

    def _reasons(self, selection: Selection) -> dict[str, str]:
        spent = None if selection.feasible else self._rules.budget_per_hour
        return reasons(self._market, selection.active, budget_spent_per_hour=spent)


def _sizes(count: int) -> list[int]:
    sizes = {count}
    size = float(count)
    while size > 1:
        size *= SHRINK
        sizes.add(max(1, round(size)))
    return sorted(sizes)
