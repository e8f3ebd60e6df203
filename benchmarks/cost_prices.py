"""Under which prices and settings the saving holds: the plan of a changed scenario, and closed forms for one set.

Cases change one thing of a scenario file at a time and plan the cheapest set anew; nothing is simulated. The closed
forms (`edge_factor`, `generation_factor`, `data_centre_factor`) keep the set of an arm and say how far a price may move
until its saving is `saving`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from swarm.capacity.model import NEARLY_BUSY
from swarm.capacity.plan.arms import Arm, ArmPlanner, Payload, Scheme
from swarm.capacity.plan.plan import references_of, saving
from swarm.capacity.plan.scenario import AsyncDc, Baseline, Colocated, Learner, Scenario, online_of
from swarm.capacity.prices import HOUR_S
from swarm.cli.plan import broadcasts_of

Change = Callable[[Scenario], Scenario]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that is changed, and the cheapest arm for which that is asked."""

    label: str
    change: Change
    scheme: Scheme = "relay"
    payload: Payload = "delta"

    @property
    def arm_name(self) -> str:
        return f"{self.scheme} {self.payload}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a case comes to: savings are shares of each baseline's cost per step as the case has it."""

    label: str
    arm: str
    max_staleness: int
    publish_every_steps: int
    active: int
    idle_share: float
    cost_per_step: float
    saving: dict[str, float]


def held_in(case: Case, scenario: Scenario) -> Held:
    changed = case.change(scenario)
    arm = cheapest_arm(changed.model_copy(update={"baseline": Baseline()}), case.scheme, case.payload)
    return Held(
        label=case.label,
        arm=case.arm_name,
        max_staleness=arm.max_staleness,
        publish_every_steps=arm.publish_every_steps,
        active=len(arm.active),
        idle_share=arm.idle_share,
        cost_per_step=arm.cost_per_step,
        saving={one.name: saving(arm.cost_per_step, one) for one in references_of(changed)},
    )


@lru_cache(maxsize=256)
def cheapest_arm(scenario: Scenario, scheme: Scheme, payload: Payload) -> Arm:
    """The plan's cheapest set for one way to send versions."""
    planner = ArmPlanner(scenario, online_of(scenario, random=None), broadcasts_of(scenario), idle_target=NEARLY_BUSY)
    return planner.cheapest(scheme, payload)


def bounded(most: int) -> Change:
    """Only bounds of at most that."""

    def change(scenario: Scenario) -> Scenario:
        kept = tuple(bound for bound in scenario.staleness.S if bound <= most)
        return _staleness(scenario, kept or (most,))

    return change


def exactly(bound: int) -> Change:
    """S is this."""
    return lambda scenario: _staleness(scenario, (bound,))


def generation(factor: float) -> Change:
    """The co-located machine generates in that many times its time."""

    def change(scenario: Scenario) -> Scenario:
        colocated = _colocated(scenario)
        return _baseline(scenario, colocated.model_copy(update={"gen_s": factor * colocated.gen_s}))

    return change


def edge_prices(factor: float) -> Change:
    """What samplers of the fleet cost per hour, and so per token; traffic costs what it did."""

    def change(scenario: Scenario) -> Scenario:
        fleet = tuple(one.model_copy(update={"price_per_h": factor * one.price_per_h}) for one in scenario.fleet)
        return scenario.model_copy(update={"fleet": fleet})

    return change


def data_centre_prices(factor: float) -> Change:
    """The learner and both baselines, which are rented from the same sort of landlord."""

    def change(scenario: Scenario) -> Scenario:
        dearer = _learner(scenario, price_per_h=factor * scenario.learner.price_per_h)
        colocated = _colocated(scenario)
        async_dc = scenario.baseline.async_dc
        if async_dc is not None:
            async_dc = async_dc.model_copy(update={"price_per_h": factor * async_dc.price_per_h})
        return _baseline(dearer, colocated.model_copy(update={"price_per_h": factor * colocated.price_per_h}), async_dc)

    return change


def uplink(mbps: float) -> Change:
    """The line of the learner, outwards."""
    return lambda scenario: _learner(scenario, up_mbps=mbps)


def egress(usd_per_gb: float) -> Change:
    """The learner pays for bytes that it sends."""
    return lambda scenario: _learner(scenario, egress_usd_per_gb=usd_per_gb)


def patch_share(f1: float) -> Change:
    """A patch over one step is that share of the weights."""
    return lambda scenario: scenario.model_copy(update={"delta": scenario.delta.model_copy(update={"f1": f1})})


def _staleness(scenario: Scenario, bounds: tuple[int, ...]) -> Scenario:
    return scenario.model_copy(update={"staleness": scenario.staleness.model_copy(update={"S": bounds})})


def _learner(scenario: Scenario, **changed: float) -> Scenario:
    learner: Learner = scenario.learner.model_copy(update=changed)
    return scenario.model_copy(update={"learner": learner})


def _colocated(scenario: Scenario) -> Colocated:
    colocated = scenario.baseline.colocated
    assert colocated is not None, "the scenario has no [baseline.colocated]"
    return colocated


def _baseline(scenario: Scenario, colocated: Colocated, async_dc: AsyncDc | None = None) -> Scenario:
    return scenario.model_copy(
        update={"baseline": Baseline(colocated=colocated, async_dc=async_dc or scenario.baseline.async_dc)}
    )


CASES = (
    Case(label="as in the file", change=lambda scenario: scenario),
    *(Case(label=f"co-located generation x{x:g}", change=generation(x)) for x in (0.6, 0.8, 1.2)),
    *(Case(label=f"edge prices x{x:g}", change=edge_prices(x)) for x in (0.5, 1.5, 2.0)),
    *(Case(label=f"data-centre prices x{x:g}", change=data_centre_prices(x)) for x in (0.7, 1.3)),
    *(
        Case(label=f"learner uplink {mbps} Mbit/s", change=uplink(mbps), scheme=scheme)
        for mbps in (100, 300, 1000)
        for scheme in ("relay", "star")
    ),
    *(Case(label="egress 0.09 per GB", change=egress(0.09), scheme=scheme) for scheme in ("relay", "star")),
    Case(label="delta f1 3 %", change=patch_share(0.03)),
    *(Case(label=f"S = {bound}", change=exactly(bound)) for bound in (2, 6)),
    *(Case(label=f"S = {bound}", change=exactly(bound), payload="full") for bound in (2, 6)),
)
"""What is asked: the ranges that public prices and lines had within a year, and the paper's bound, 6."""


# -- closed forms for one set -------------------------------------------------------------------------------------


def edge_factor(arm: Arm, colocated: Colocated, saving: float) -> float:
    """Rent of samplers, times this, at which the arm saves `saving` against the co-located machine: with c the
    cost of its step, (1 - saving) c = (learner + traffic + x rent) step / 3600. Negative: not even
    with samplers for nothing."""
    allowed = (1 - saving) * _colocated_per_step(colocated) * HOUR_S / arm.step_s
    spare = allowed - arm.learner_per_hour - arm.traffic_per_hour
    return spare / arm.rent_per_hour if arm.rent_per_hour else math.copysign(math.inf, spare)


def generation_factor(arm: Arm, colocated: Colocated, saving: float) -> float:
    """The co-located machine's `gen_s`, times this, at which the arm saves `saving`: faster than that, and it saves
    less. Negative: even a machine that generates in no time is dearer."""
    step_s = arm.cost_per_step / (1 - saving) * HOUR_S / colocated.price_per_h
    return (step_s - colocated.switch_s - colocated.train_s) / colocated.gen_s


def data_centre_factor(arm: Arm, colocated: Colocated, saving: float) -> float:
    """Prices of learner and co-located machine, times this, at which the arm saves `saving`: cheaper than that, and it
    saves less. With E = rent + traffic, which stay: (1 - saving) x c = (x learner + E) step / 3600. Infinite: at no
    price, since the learner alone costs as much."""
    allowed = (1 - saving) * _colocated_per_step(colocated) * HOUR_S / arm.step_s
    spare = allowed - arm.learner_per_hour
    return (arm.rent_per_hour + arm.traffic_per_hour) / spare if spare > 0 else math.inf


def _colocated_per_step(colocated: Colocated) -> float:
    step_s = colocated.gen_s + colocated.switch_s + colocated.train_s
    return colocated.price_per_h * step_s / HOUR_S
