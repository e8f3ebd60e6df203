"""Which fleet to rent or admit for a scenario, beside other ways to do the same, and what would help most next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from swarm.capacity.advice import Advice, advice_for
from swarm.capacity.arms import Arm, Arms, Payload, Scheme, Setting, Ways, settings_of
from swarm.capacity.baselines import Reference, references_of
from swarm.capacity.fleet import Worker
from swarm.capacity.model import NEARLY_BUSY, shortfall
from swarm.capacity.scenario import Scenario, lengths_of, online_of

Progress = Callable[[str, float], None]
"""Told what is being worked out, and which share of all is done."""

STAGES = len(get_args(Payload)) * len(get_args(Scheme)) + 1
"""Arms, and the advice: about as long each."""


class NoFeasibleSet(ValueError):
    """Not one sampler could deliver in time, whatever the settings: the message is the inequality that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLine:
    """A class of the fleet: how many are there at a time and how many of them are active; price and rate of each."""

    name: str
    online: int
    active: int
    price_per_h: float
    rollouts_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`arms`: every scheme and payload, with all samplers active and with the cheapest set, at the same settings.
    `chosen` is the cheapest set with relay and deltas, which is how a swarm runs; `advice` is for it."""

    scenario: str
    currency: str
    prices_as_of: str
    needed_rollouts_per_s: float
    arms: tuple[Arm, ...]
    chosen: Arm
    classes: tuple[ClassLine, ...]
    advice: tuple[Advice, ...]
    references: tuple[Reference, ...]


def plan_for(
    scenario: Scenario, ways: Ways, *, idle_target: float = NEARLY_BUSY, progress: Progress | None = None
) -> Plan:
    """The plan for the samplers that are there at a time, with the links that their classes have in the mean.
    NoFeasibleSet where none of them could ever deliver in time."""
    tell = progress or (lambda what, share: None)
    workers = online_of(scenario, random=None)
    arms = Arms(scenario, workers, ways, idle_target=idle_target)
    _check_some_is_in_time(arms, workers)
    found: list[Arm] = []
    for payload in get_args(Payload):
        for scheme in get_args(Scheme):
            tell(f"planning {scheme} {payload}", len(found) / 2 / STAGES)
            cheapest = arms.cheapest(scheme, payload)
            found += [arms.arm(scheme, payload, cheapest.setting, "all"), cheapest]
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
        advice=advice_for(arms, chosen),
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


def _check_some_is_in_time(arms: Arms, workers: list[Worker]) -> None:
    """With deltas, sent to the sampler of the fastest line alone, at one of the settings."""
    best = max(workers, key=lambda worker: worker.downlink_bytes_per_s)
    faults: dict[Setting, str] = {}
    for setting in settings_of(arms.scenario):
        plan = arms.disseminate("relay", "delta", setting)([best])
        fault = shortfall(arms.demand(setting), broadcast_s=plan.broadcast_s, generation_s=best.place_s)
        if fault is None:
            return
        faults[setting] = fault
    setting = max(faults, key=lambda one: one.max_staleness - one.publish_every_steps)
    raise NoFeasibleSet(
        f"no setting lets a rollout be fresh enough, not even of {best.name} alone; nearest is max_staleness "
        f"{setting.max_staleness} with publish_every_steps {setting.publish_every_steps}: {faults[setting]}"
    )
