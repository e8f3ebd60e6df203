"""Which fleet to rent or admit for a scenario, and what the same training costs without a swarm.

Theory of operation. For each pair of S and kappa the closed form says what a step costs with the cheapest samplers,
about as many as will be active. For the few best pairs a set is chosen. Among those of about the same cost the smallest
bound comes first: fresher rollouts learn better. A simulation of the real rollout plane then says how long the learner
waits for exactly that set, and how old its rollouts are. If that makes a step dearer than expected, the next pair is
simulated too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from swarm.pay.delivery import sustained
from swarm.pay.fleet import GB, Demand, Disseminate, Worker
from swarm.pay.model import NEARLY_BUSY, Binds, predict, shortfall
from swarm.pay.prices import HOUR_S, start_per_hour, traffic_per_hour
from swarm.pay.selection import Rules, Search, Selection
from swarm.plan.scenario import Scenario, delta_bytes, deltas_to, demand_of, lengths_of, online_of
from swarm.plan.simulate.fixed import run_fixed
from swarm.plan.simulate.learner import warmup_steps

TYPICAL = 1.5
"""Rate of the cheapest samplers, in R / T, with which settings are ranked: about what is chosen in the end."""

LONGEST_PERIOD = 16  # Longest period between versions, in steps: rarer ones save little more traffic
MAX_PLANNED = 3  # Settings for which a set is chosen
ROLLOUTS = 10_000  # That count, simulated in some two seconds, but at least MIN_STEPS steps
MIN_STEPS = 8
SETTLED_STEPS = 32  # Before them, in at most four times ROLLOUTS: until then pacing learns how old rollouts must be
AS_CHEAP = 1.01  # Costs per step within this factor count as equal: prices are not known better


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A way to train without a swarm. `gpus` counts those next to the learner (async_dc) or all of them (colocated);
    prices are per hour and per learner step."""

    name: str
    gpus: int
    step_s: float
    cost_per_hour: float
    cost_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLine:
    """A class of the fleet: how many are present at a time and how many of them are active; price and rate of each."""

    name: str
    online: int
    active: int
    price_per_h: float
    rollouts_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choice and its figures. Prices per hour: `rent` of samplers and their starts, `traffic` of samplers and
    learner, and `learner`; `cost_per_hour` is their sum. `idle_share`, `discarded_share`, `mean_staleness` and `step_s`
    are simulated, with everybody present. `stale_per_step`: what of `cost_per_step` goes to discarded rollouts.
    `cost_per_point`: of held-out accuracy, if the scenario says its steps. `feasible`: idle within the target."""

    scenario: str
    currency: str
    prices_as_of: str
    needed_rollouts_per_s: float
    max_staleness: int
    publish_every_steps: int
    version_bytes: float
    active: tuple[str, ...]
    classes: tuple[ClassLine, ...]
    rollouts_per_s: float
    broadcast_s: float
    idle_share: float
    discarded_share: float
    mean_staleness: float
    step_s: float
    binds: Binds
    rent_per_hour: float
    traffic_per_hour: float
    learner_per_hour: float
    cost_per_hour: float
    cost_per_step: float
    cost_per_token: float
    stale_per_step: float
    cost_per_point: float | None
    feasible: bool
    references: tuple[Alternative, ...]


class NoFeasibleSet(ValueError):
    """No sampler could deliver in time at any setting; the message is the inequality that fails."""


Progress = Callable[[str, float], None]  # Receives what is being computed, and the share of everything that is done


def plan_for(scenario: Scenario, *, idle_target: float = NEARLY_BUSY, progress: Progress | None = None) -> Plan:
    """Plan for the samplers that are present at a time, with the quantiles of their classes' links. Raise NoFeasibleSet
    if none of them could ever deliver in time."""
    tell = progress or (lambda what, share: None)
    workers = online_of(scenario, random=None)
    _check_some_is_in_time(scenario, workers)
    tell("choosing S and K", 0.0)
    drafts = [_draft(scenario, workers, one, idle_target) for one in ranked_demands(scenario, workers)[:MAX_PLANNED]]
    least = AS_CHEAP * min(draft.cost_per_step for draft in drafts)
    drafts.sort(key=lambda draft: (max(draft.cost_per_step, least), draft.demand.max_staleness))
    plans: list[Plan] = []
    for draft in drafts:
        tell(f"simulating S = {draft.demand.max_staleness}", (1 + len(plans)) / (1 + len(drafts)))
        plans.append(_simulated(scenario, draft, idle_target))
        if plans[-1].cost_per_step <= AS_CHEAP * draft.cost_per_step:
            break
    near = [one for one in plans if one.cost_per_step <= AS_CHEAP * min(plan.cost_per_step for plan in plans)]
    return min(near, key=lambda plan: plan.max_staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A bound and a period with the cheapest set for them, by the closed form."""

    demand: Demand
    workers: tuple[Worker, ...]
    selection: Selection
    cost_per_step: float


def _draft(scenario: Scenario, workers: Sequence[Worker], demand: Demand, idle_target: float) -> Draft:
    rules = Rules(idle_target=idle_target, least_margin=scenario.staleness.safety_margin - 1)
    disseminate = disseminate_in(scenario, demand.publish_every_steps)
    selection = Search(demand, workers, disseminate, rules).select()
    chosen = tuple(worker for worker in workers if worker.name in set(selection.active))
    step_s = selection.prediction.step_s
    cost_per_hour = scenario.learner.price_per_h + sum(_prices(scenario, demand, chosen, step_s=step_s))
    return Draft(demand=demand, workers=chosen, selection=selection, cost_per_step=cost_per_hour * step_s / HOUR_S)


def _simulated(scenario: Scenario, draft: Draft, idle_target: float) -> Plan:
    demand, chosen = draft.demand, draft.workers
    delivery = disseminate_in(scenario, demand.publish_every_steps)(chosen)
    found = run_fixed(
        demand,
        chosen,
        delivery.install_s,
        steps=max(MIN_STEPS, ROLLOUTS // demand.rollouts_per_step),
        warmup_steps=max(warmup_steps(demand), min(SETTLED_STEPS, 4 * ROLLOUTS // demand.rollouts_per_step)),
        seed=0,
    )
    rent, traffic = _prices(scenario, demand, chosen, step_s=found.step_s)
    learner = scenario.learner.price_per_h
    cost_per_hour = rent + traffic + learner
    cost_per_step, steps = cost_per_hour * found.step_s / HOUR_S, scenario.learner.steps_per_point
    return Plan(
        scenario=scenario.scenario.name,
        currency=scenario.scenario.currency,
        prices_as_of=scenario.scenario.prices_as_of,
        needed_rollouts_per_s=demand.rollouts_per_step / demand.train_step_s,
        max_staleness=demand.max_staleness,
        publish_every_steps=demand.publish_every_steps,
        version_bytes=delta_bytes(scenario, demand.publish_every_steps),
        active=draft.selection.active,
        classes=_class_lines(scenario, chosen),
        rollouts_per_s=sum(worker.rollouts_per_s for worker in chosen),
        broadcast_s=delivery.broadcast_s,
        idle_share=found.idle_share,
        discarded_share=found.discarded_share,
        mean_staleness=found.mean_staleness,
        step_s=found.step_s,
        binds=draft.selection.prediction.binds,
        rent_per_hour=rent,
        traffic_per_hour=traffic,
        learner_per_hour=learner,
        cost_per_hour=cost_per_hour,
        cost_per_step=cost_per_step,
        cost_per_token=cost_per_step / demand.rollouts_per_step / lengths_of(scenario).mean,
        stale_per_step=found.discarded_share * (rent + traffic) * found.step_s / HOUR_S,
        cost_per_point=cost_per_step * steps if steps is not None else None,
        feasible=found.idle_share <= idle_target,
        references=references_of(scenario),
    )


def _class_lines(scenario: Scenario, chosen: Sequence[Worker]) -> tuple[ClassLine, ...]:
    mean_tokens, active = lengths_of(scenario).mean, Counter(worker.device_class for worker in chosen)
    return tuple(
        ClassLine(
            name=one.name,
            online=one.online,
            active=active[one.name],
            price_per_h=one.price_per_h,
            rollouts_per_s=one.tokens_per_s / mean_tokens,
        )
        for one in scenario.fleet
    )


def _prices(scenario: Scenario, demand: Demand, chosen: Sequence[Worker], *, step_s: float) -> tuple[float, float]:
    """Return rent and traffic per hour of these samplers, if a step takes `step_s`."""
    plan = disseminate_in(scenario, demand.publish_every_steps)(chosen)
    versions_per_hour = HOUR_S / (demand.publish_every_steps * step_s)
    traffic = sum(
        traffic_per_hour(worker, down_bytes=down, up_bytes=up, versions_per_hour=versions_per_hour)
        for worker, down, up in zip(chosen, plan.down_bytes, plan.up_bytes, strict=True)
    )
    traffic += versions_per_hour * plan.learner_up_bytes / GB * scenario.learner.egress_usd_per_gb
    return sum(worker.cost_per_hour + start_per_hour(worker) for worker in chosen), traffic


# -- S and kappa -----------------------------------------------------------------------------------------------------


def demands_of(scenario: Scenario) -> list[Demand]:
    """Return the demand for each pair of S and kappa to choose from: every kappa up to S + 1 and LONGEST_PERIOD, or
    only S - 1 under the paper's rule."""
    rule = scenario.staleness.kappa_rule
    return [
        demand_of(scenario, max_staleness=bound, publish_every_steps=period)
        for bound in sorted(set(scenario.staleness.S))
        for period in (range(1, min(bound + 1, LONGEST_PERIOD) + 1) if rule == "safe" else [max(1, bound - 1)])
    ]


def ranked_demands(scenario: Scenario, workers: Sequence[Worker]) -> list[Demand]:
    """Return the demand with the best period of each bound, by the closed form. The cheapest come first; among about
    equal costs, the smallest bound."""
    cheapest = _cheapest_workers(scenario, workers)
    best: dict[int, tuple[float, Demand]] = {}
    for demand in demands_of(scenario):
        cost = _estimate(scenario, demand, cheapest)
        if cost * AS_CHEAP < best.get(demand.max_staleness, (math.inf, demand))[0]:
            best[demand.max_staleness] = (cost, demand)
    least = min(cost for cost, _ in best.values())
    ranked = sorted(best.values(), key=lambda one: (max(one[0], AS_CHEAP * least), one[1].max_staleness))
    return [demand for _, demand in ranked]


def _estimate(scenario: Scenario, demand: Demand, workers: Sequence[Worker]) -> float:
    """Estimate the cost of a step, with only a part of these samplers if they are more than enough."""
    plan = disseminate_in(scenario, demand.publish_every_steps)(workers)
    prediction = predict(demand, workers, plan.install_s)
    price = sum(_prices(scenario, demand, workers, step_s=prediction.step_s))
    if prediction.idle_share <= NEARLY_BUSY:
        needed = scenario.staleness.safety_margin * demand.rollouts_per_step / demand.train_step_s
        price *= min(1.0, needed / sum(worker.rollouts_per_s for worker in workers))
    return (scenario.learner.price_per_h + price) * prediction.step_s / HOUR_S


def _cheapest_workers(scenario: Scenario, workers: Sequence[Worker]) -> list[Worker]:
    """Return the cheapest samplers per rollout, about as many as will be active."""
    needed = TYPICAL * scenario.learner.rollouts_per_step / scenario.learner.train_step_s
    chosen: list[Worker] = []
    for worker in sorted(workers, key=lambda one: one.cost_per_hour / one.rollouts_per_s):
        if sum(one.rollouts_per_s for one in chosen) >= needed:
            break
        chosen.append(worker)
    return chosen


@lru_cache(maxsize=64)  # Each keeps the plans that it made: a set is asked for by choice, price and simulation
def disseminate_in(scenario: Scenario, publish_every_steps: int) -> Disseminate:
    """Return how deltas over so many steps reach samplers, one after another, by the swarm's own plan."""
    once = deltas_to(scenario, publish_every_steps)
    return sustained(once, period_s=publish_every_steps * scenario.learner.train_step_s)


def _check_some_is_in_time(scenario: Scenario, workers: Sequence[Worker]) -> None:
    """Check that deltas sent only to the sampler with the fastest line arrive in time with some S and kappa."""
    best = max(workers, key=lambda worker: worker.downlink_bytes_per_s)
    faults: dict[Demand, str] = {}
    for demand in demands_of(scenario):
        broadcast_s = disseminate_in(scenario, demand.publish_every_steps)([best]).broadcast_s
        fault = shortfall(demand, broadcast_s=broadcast_s, generation_s=best.place_s)
        if fault is None:
            return
        faults[demand] = fault
    nearest = max(faults, key=lambda one: one.max_staleness - one.publish_every_steps)
    raise NoFeasibleSet(
        f"no setting lets a rollout be fresh enough, not even of {best.name} alone; nearest is max_staleness "
        f"{nearest.max_staleness} with publish_every_steps {nearest.publish_every_steps}: {faults[nearest]}"
    )


# -- without a swarm -----------------------------------------------------------------------------------------------


def references_of(scenario: Scenario) -> tuple[Alternative, ...]:
    """Return the references that the scenario file describes."""
    found = []
    if (colocated := scenario.baseline.colocated) is not None:
        step_s = colocated.gen_s + colocated.switch_s + colocated.train_s
        found.append(_reference("colocated", colocated.gpus, step_s, colocated.price_per_h))
    if (async_dc := scenario.baseline.async_dc) is not None:
        learner = scenario.learner
        tokens_per_s = learner.rollouts_per_step / learner.train_step_s * lengths_of(scenario).mean
        gpus = math.ceil(tokens_per_s * async_dc.margin / async_dc.tokens_per_s)
        price = learner.price_per_h + gpus * async_dc.price_per_h
        found.append(_reference("async_dc", gpus, learner.train_step_s, price))
    return tuple(found)


def _reference(name: str, gpus: int, step_s: float, price_per_hour: float) -> Alternative:
    return Alternative(
        name=name,
        gpus=gpus,
        step_s=step_s,
        cost_per_hour=price_per_hour,
        cost_per_step=price_per_hour * step_s / HOUR_S,
    )


def saving(cost_per_step: float, reference: Alternative) -> float:
    """Return the share of the reference's cost per step that is saved; negative if the reference is cheaper."""
    return 1 - cost_per_step / reference.cost_per_step
