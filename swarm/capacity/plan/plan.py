"""Which fleet to rent or admit for a scenario, what the same training costs without a swarm, and what would help."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from swarm.capacity.fleet import Worker
from swarm.capacity.model import NEARLY_BUSY, predict, shortfall
from swarm.capacity.plan.arms import Arm, ArmPlanner, Broadcasts, Payload, Scheme, Setting, settings_of
from swarm.capacity.plan.scenario import FleetClass, Scenario, class_workers, lengths_of, online_of
from swarm.capacity.prices import HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A way to train without a swarm. `gpus` counts those beside the learner (async_dc) or all of them (colocated);
    prices are per hour and per learner step."""

    name: str
    gpus: int
    step_s: float
    cost_per_hour: float
    cost_per_step: float


def references_of(scenario: Scenario) -> tuple[Reference, ...]:
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


def _reference(name: str, gpus: int, step_s: float, price_per_hour: float) -> Reference:
    return Reference(
        name=name,
        gpus=gpus,
        step_s=step_s,
        cost_per_hour=price_per_hour,
        cost_per_step=price_per_hour * step_s / HOUR_S,
    )


def saving(cost_per_step: float, reference: Reference) -> float:
    """Return the share of the reference's cost per step that is saved; negative if the reference is cheaper."""
    return 1 - cost_per_step / reference.cost_per_step


MAX_MORE = 64  # Samplers of one class that are tried as an addition: a larger gap needs another plan, not advice
MAX_STEPS = 16  # Largest increase of S that is tried
WORTH_SAYING = 0.01  # Smallest change of the idle share, or smallest relative saving, that is reported
MAX_ADVICE = 3  # Changes that are reported: nobody follows more
AS_YOUNG = 0.1  # Steps of mean staleness that make no difference: predictions are not better


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change, and the idle share and cost per step that it leads to."""

    change: str
    idle_share: float
    cost_per_step: float


def advice_for(planner: ArmPlanner, arm: Arm) -> tuple[Advice, ...]:
    """Return the best changes first, or none if no small change is worthwhile. If the learner waits, these are changes
    that end that, the cheapest first; otherwise changes that make a step cheaper."""
    if arm.feasible:
        found = [one for one in _cheaper(planner, arm) if one.cost_per_step < (1 - WORTH_SAYING) * arm.cost_per_step]
        return tuple(sorted(found, key=lambda one: one.cost_per_step)[:MAX_ADVICE])
    tried = [*_more_samplers(planner, arm), *_larger_bounds(planner, arm), *_faster_broadcast(planner, arm)]
    found = [one for one in tried if one.idle_share < arm.idle_share - WORTH_SAYING]
    found.sort(key=lambda one: (max(one.idle_share, planner.idle_target), one.cost_per_step))
    return tuple(found[:MAX_ADVICE])


def _more_samplers(planner: ArmPlanner, arm: Arm) -> list[Advice]:
    chosen = _workers(planner, arm)
    found = []
    for one in planner.scenario.fleet:

        def larger(number: int, one: FleetClass = one) -> Arm:
            return planner.arm_of(arm.scheme, arm.payload, arm.setting, "all", [*chosen, *_more(planner, one, number)])

        number, enough = _enough(larger, MAX_MORE, planner.idle_target)
        found.append(_advice(f"{number} more of class {one.name}", enough))
    return found


def _enough(larger: Callable[[int], Arm], most: int, idle_target: float) -> tuple[int, Arm]:
    """Return the least change that brings the idle share under the target, or about as low as the largest does."""
    goal = max(idle_target, larger(most).idle_share + WORTH_SAYING)
    number = 1 + bisect_left(range(1, most), True, key=lambda count: larger(count).idle_share <= goal)
    return number, larger(number)


def fresher_than(planner: ArmPlanner, arm: Arm) -> Arm | None:
    """Return the arm with as many more samplers, of the cheapest class that has some left, as make rollouts about as
    young as twice as many samplers would. None if these would change hardly anything."""
    chosen, fleet = _workers(planner, arm), planner.scenario.fleet
    left = [one for one in fleet if one.online > arm.by_class.get(one.name, 0)] or fleet
    cheapest = min(left, key=lambda one: one.price_per_h / one.tokens_per_s)
    more = _more(planner, cheapest, len(chosen))

    def larger(count: int) -> Arm:
        return planner.arm_of(arm.scheme, arm.payload, arm.setting, arm.activate, [*chosen, *more[:count]])

    goal = larger(len(more)).mean_staleness + AS_YOUNG
    enough = bisect_left(range(len(more)), True, key=lambda count: larger(count).mean_staleness <= goal)
    found = larger(enough)
    return found if found.mean_staleness < arm.mean_staleness - AS_YOUNG else None


def _larger_bounds(planner: ArmPlanner, arm: Arm) -> list[Advice]:
    chosen = _workers(planner, arm)

    def larger(more: int) -> Arm:
        setting = Setting(max_staleness=arm.max_staleness + more, publish_every_steps=arm.publish_every_steps)
        return planner.arm_of(arm.scheme, arm.payload, setting, "all", chosen)

    _, found = _enough(larger, MAX_STEPS, planner.idle_target)
    return [_advice(f"S = {found.max_staleness} instead of {arm.max_staleness}", found)]


def _faster_broadcast(planner: ArmPlanner, arm: Arm) -> list[Advice]:
    """Try versions in half the time, at no extra cost per hour."""
    chosen = _workers(planner, arm)
    install_s = planner.disseminate(arm.scheme, arm.payload, arm.setting)(chosen).install_s
    prediction = predict(planner.demand(arm.setting), chosen, [seconds / 2 for seconds in install_s])
    cost_per_step = arm.cost_per_step * prediction.step_s / arm.step_s
    change = "versions in half the time (fewer bytes, a faster line of the learner)"
    return [Advice(change=change, idle_share=prediction.idle_share, cost_per_step=cost_per_step)]


def _cheaper(planner: ArmPlanner, arm: Arm) -> list[Advice]:
    """Try a quarter more of each class that is used up; more of any other class would only wait."""
    found = []
    for one in planner.scenario.fleet:
        if arm.by_class.get(one.name, 0) < one.online:
            continue
        number = max(1, round(one.online / 4))
        workers = [*planner.workers, *_more(planner, one, number)]
        larger = ArmPlanner(planner.scenario, workers, planner.broadcasts, idle_target=planner.idle_target)
        found.append(
            _advice(f"{number} more of class {one.name}", larger.arm(arm.scheme, arm.payload, arm.setting, "cheapest"))
        )
    return found


def _workers(planner: ArmPlanner, arm: Arm) -> list[Worker]:
    active = set(arm.active)
    return [worker for worker in planner.workers if worker.name in active]


def _more(planner: ArmPlanner, one: FleetClass, number: int) -> Sequence[Worker]:
    added = class_workers(planner.scenario, one, number, random=None)
    return [replace(worker, name=f"{worker.name}-more") for worker in added]


def _advice(change: str, arm: Arm) -> Advice:
    return Advice(change=change, idle_share=arm.idle_share, cost_per_step=arm.cost_per_step)


Progress = Callable[[str, float], None]  # Receives what is being computed, and the share of everything that is done
STAGES = len(get_args(Payload)) * len(get_args(Scheme)) + 1
"""The arms of each payload and scheme, and the advice: about equally long"""


class NoFeasibleSet(ValueError):
    """No sampler could deliver in time at any setting; the message is the inequality that fails."""


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
    """`arms`: every scheme and payload, with all samplers active and with the cheapest set, at the same settings.
    `chosen` is the cheapest set with relay and deltas, which is how a swarm runs; `advice` and `fresher` are for it."""

    scenario: str
    currency: str
    prices_as_of: str
    needed_rollouts_per_s: float
    arms: tuple[Arm, ...]
    chosen: Arm
    classes: tuple[ClassLine, ...]
    advice: tuple[Advice, ...]
    fresher: Arm | None
    references: tuple[Reference, ...]


def plan_for(
    scenario: Scenario, broadcasts: Broadcasts, *, idle_target: float = NEARLY_BUSY, progress: Progress | None = None
) -> Plan:
    """Plan for the samplers that are present at a time, with the quantiles of their classes' links. Raise NoFeasibleSet
    if none of them could ever deliver in time."""
    tell = progress or (lambda what, share: None)
    workers = online_of(scenario, random=None)
    planner = ArmPlanner(scenario, workers, broadcasts, idle_target=idle_target)
    _check_some_is_in_time(planner, workers)
    found: list[Arm] = []
    for payload in get_args(Payload):
        for scheme in get_args(Scheme):
            tell(f"planning {scheme} {payload}", len(found) / 2 / STAGES)
            cheapest = planner.cheapest(scheme, payload)
            found += [planner.arm(scheme, payload, cheapest.setting, "all"), cheapest]
    chosen = found[-1]
    tell("what would help most next", len(found) / 2 / STAGES)
    return Plan(
        scenario=scenario.scenario.name,
        currency=scenario.scenario.currency,
        prices_as_of=scenario.scenario.prices_as_of,
        needed_rollouts_per_s=scenario.learner.rollouts_per_step / scenario.learner.train_step_s,
        arms=tuple(found),
        chosen=chosen,
        classes=_class_lines(scenario, chosen),
        advice=advice_for(planner, chosen),
        fresher=fresher_than(planner, chosen),
        references=references_of(scenario),
    )


def _class_lines(scenario: Scenario, arm: Arm) -> tuple[ClassLine, ...]:
    mean_tokens = lengths_of(scenario).mean
    return tuple(
        ClassLine(
            name=one.name,
            online=one.online,
            active=arm.by_class.get(one.name, 0),
            price_per_h=one.price_per_h,
            rollouts_per_s=one.tokens_per_s / mean_tokens,
        )
        for one in scenario.fleet
    )


def _check_some_is_in_time(planner: ArmPlanner, workers: list[Worker]) -> None:
    """Check that deltas sent only to the sampler with the fastest line arrive in time at one of the settings."""
    best = max(workers, key=lambda worker: worker.downlink_bytes_per_s)
    faults: dict[Setting, str] = {}
    for setting in settings_of(planner.scenario):
        plan = planner.disseminate("relay", "delta", setting)([best])
        fault = shortfall(planner.demand(setting), broadcast_s=plan.broadcast_s, generation_s=best.place_s)
        if fault is None:
            return
        faults[setting] = fault
    setting = max(faults, key=lambda one: one.max_staleness - one.publish_every_steps)
    raise NoFeasibleSet(
        f"no setting lets a rollout be fresh enough, not even of {best.name} alone; nearest is max_staleness "
        f"{setting.max_staleness} with publish_every_steps {setting.publish_every_steps}: {faults[setting]}"
    )
