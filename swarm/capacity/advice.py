"""What would help most next: small changes of a plan, each predicted anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.capacity.arms import Arm, Arms, Setting
from swarm.capacity.fleet import Worker
from swarm.capacity.model import predict
from swarm.capacity.scenario import FleetClass, class_workers

MOST_MORE = 64
"""Samplers of one class that are tried as an addition: who lacks more needs another plan, not advice."""

MOST_STEPS = 16
"""By which S is raised at most."""

WORTH_SAYING = 0.01
"""Least change of the idle share, or least relative saving, that is told."""

MOST_ADVICE = 3
"""Changes that are told: who reads more follows none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change and what it does: idle share and cost per step afterwards."""

    change: str
    idle_share: float
    cost_per_step: float


def advice_for(arms: Arms, arm: Arm) -> tuple[Advice, ...]:
    """The best first; none where no small change is worth while. While the learner waits: what ends that, the cheapest
    first. Else: what makes a step cheaper."""
    if arm.feasible:
        found = [one for one in _cheaper(arms, arm) if one.cost_per_step < (1 - WORTH_SAYING) * arm.cost_per_step]
        return tuple(sorted(found, key=lambda one: one.cost_per_step)[:MOST_ADVICE])
    tried = [*_more_samplers(arms, arm), *_larger_bounds(arms, arm), *_faster_broadcast(arms, arm)]
    found = [one for one in tried if one.idle_share < arm.idle_share - WORTH_SAYING]
    found.sort(key=lambda one: (max(one.idle_share, arms.idle_target), one.cost_per_step))
    return tuple(found[:MOST_ADVICE])


def _more_samplers(arms: Arms, arm: Arm) -> list[Advice]:
    """Of each class."""
    chosen = _workers(arms, arm)
    found = []
    for one in arms.scenario.fleet:

        def larger(number: int, one: FleetClass = one) -> Arm:
            return arms.arm_of(arm.scheme, arm.payload, arm.setting, "all", [*chosen, *_more(arms, one, number)])

        number, enough = _enough(larger, MOST_MORE, arms.idle_target)
        found.append(_advice(f"{number} more of class {one.name}", enough))
    return found


def _enough(larger: Callable[[int], Arm], most: int, idle_target: float) -> tuple[int, Arm]:
    """The least change that brings the idle share under the target, or about as low as the largest does."""
    goal = max(idle_target, larger(most).idle_share + WORTH_SAYING)
    number = fewest(lambda count: larger(count).idle_share <= goal, most) or most
    return number, larger(number)


def fewest(suffices: Callable[[int], bool], most: int) -> int | None:
    """The least of 1 to `most` that suffices, where all above it do as well; None if none does."""
    high = 1
    while not suffices(high):
        if high == most:
            return None
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _larger_bounds(arms: Arms, arm: Arm) -> list[Advice]:
    """With the active set as it is."""
    chosen = _workers(arms, arm)

    def larger(more: int) -> Arm:
        setting = Setting(max_staleness=arm.max_staleness + more, publish_every_steps=arm.publish_every_steps)
        return arms.arm_of(arm.scheme, arm.payload, setting, "all", chosen)

    _, found = _enough(larger, MOST_STEPS, arms.idle_target)
    return [_advice(f"S = {found.max_staleness} instead of {arm.max_staleness}", found)]


def _faster_broadcast(arms: Arms, arm: Arm) -> list[Advice]:
    """Versions in half the time; it costs what it costs now."""
    chosen = _workers(arms, arm)
    install_s = arms.disseminate(arm.scheme, arm.payload, arm.setting)(chosen).install_s
    prediction = predict(arms.demand(arm.setting), chosen, [seconds / 2 for seconds in install_s])
    cost_per_step = arm.cost_per_step * prediction.step_s / arm.step_s
    change = "versions in half the time (fewer bytes, a faster line of the learner)"
    return [Advice(change=change, idle_share=prediction.idle_share, cost_per_step=cost_per_step)]


def _cheaper(arms: Arms, arm: Arm) -> list[Advice]:
    """A quarter more of a class that is used up: dearer ones would wait."""
    found = []
    for one in arms.scenario.fleet:
        if arm.by_class.get(one.name, 0) < one.online:
            continue
        number = max(1, round(one.online / 4))
        more = Arms(arms.scenario, [*arms.workers, *_more(arms, one, number)], arms.ways, idle_target=arms.idle_target)
        found.append(
            _advice(f"{number} more of class {one.name}", more.arm(arm.scheme, arm.payload, arm.setting, "cheapest"))
        )
    return found


def _workers(arms: Arms, arm: Arm) -> list[Worker]:
    active = set(arm.active)
    return [worker for worker in arms.workers if worker.name in active]


def _more(arms: Arms, one: FleetClass, number: int) -> Sequence[Worker]:
    """Like the others of the class, by other names."""
    added = class_workers(arms.scenario, one, number, random=None)
    return [replace(worker, name=f"{worker.name}-more") for worker in added]


def _advice(change: str, arm: Arm) -> Advice:
    return Advice(change=change, idle_share=arm.idle_share, cost_per_step=arm.cost_per_step)
