"""What the same training costs without a swarm: on one machine in turn, or beside whole data-centre GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.capacity.prices import HOUR_S
from swarm.capacity.scenario import Scenario, lengths_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One of them: `gpus` beside the learner or all there are, prices per hour and per learner step."""

    name: str
    gpus: int
    step_s: float
    cost_per_hour: float
    cost_per_step: float


def colocated_step_s(*, gen_s: float, switch_s: float, train_s: float) -> float:
    """Generation, switch and training, one after the other."""
    return gen_s + switch_s + train_s


def whole_gpus(*, rollouts_per_s: float, mean_tokens: float, tokens_per_s: float, margin: float) -> int:
    """GPUs that generate `margin` times the rate that is needed."""
    return math.ceil(rollouts_per_s * mean_tokens * margin / tokens_per_s)


def references_of(scenario: Scenario) -> tuple[Reference, ...]:
    """Those that the file describes."""
    found = []
    if (colocated := scenario.baseline.colocated) is not None:
        step_s = colocated_step_s(gen_s=colocated.gen_s, switch_s=colocated.switch_s, train_s=colocated.train_s)
        found.append(_reference("colocated", colocated.gpus, step_s, colocated.price_per_h))
    if (async_dc := scenario.baseline.async_dc) is not None:
        learner = scenario.learner
        gpus = whole_gpus(
            rollouts_per_s=learner.rollouts_per_step / learner.train_step_s,
            mean_tokens=lengths_of(scenario).mean,
            tokens_per_s=async_dc.tokens_per_s,
            margin=async_dc.margin,
        )
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
    """Share of the reference's cost per step that is saved; negative where it is cheaper."""
    return 1 - cost_per_step / reference.cost_per_step
