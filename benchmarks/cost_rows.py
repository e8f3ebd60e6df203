"""The rows of benchmarks/cost: what was planned, simulated and reckoned by hand for an arm, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from benchmarks.cost_prices import bounded, cheapest_arm
from swarm.capacity.fleet import Worker
from swarm.capacity.model import NEARLY_BUSY
from swarm.capacity.plan.arms import Activate, Arm
from swarm.capacity.plan.plan import Reference, references_of, saving
from swarm.capacity.plan.scenario import Baseline, Scenario, demand_of, lengths_of
from swarm.capacity.prices import HOUR_S
from swarm.capacity.selection import Rules
from swarm.cli.plan import planned
from swarm.simulate.outcome import Settings
from swarm.simulate.swarm import CapacitySimulation, Choice
from swarm.simulate.timeline import StepTaken
from tests.simulator.capacity import run_fixed

CHOSEN: tuple[str, Activate] = ("relay delta", "cheapest")

TARGET_SAVING = 0.333
"""The least that ECHO-2 reports against its centralised baseline; the most is 36.3 %."""

MAX_IDLE = NEARLY_BUSY + 0.01
"""Of a simulation: the target of the choice, and a point for churn."""

NEAR = 0.03
"""Difference of savings that counts as the same: of one seed, whole samplers and drawn links."""

PAPER_STALENESS = 6
"""ECHO-2's bound; at 11 it calls training unstable."""

LONG_HOURS = 14.0
"""Virtual hours of the chosen arm: the correlated departures of the files are at noon."""

RUNNABLE = ("lab-4b", "volunteers-8b", "internet-32b")
"""Scenarios in bf16. The others are two of them with weights rounded to fp8."""

HOURS = {
    "lab-4b": 4.0,
    "volunteers-8b": 4.0,
    "internet-32b": 8.0,
    "volunteers-8b-fp8": 4.0,
    "internet-32b-fp8": 8.0,
}
"""Virtual hours of the other arms: 72 steps and more, 30 of the long ones."""

ALL_SIMULATED = {
    "lab-4b": ("relay delta", "relay full", "star delta", "star full"),
    "volunteers-8b": ("relay delta",),
    "volunteers-8b-fp8": ("relay delta",),
}
"""Of arms with everybody active: the rest of them takes minutes each and is far off in any case."""

NOT_SIMULATED = {
    "volunteers-8b": (f"star full, S <= {PAPER_STALENESS}",),
    "internet-32b": ("star full", f"star full, S <= {PAPER_STALENESS}"),
    "volunteers-8b-fp8": (f"star full, S <= {PAPER_STALENESS}",),
    "internet-32b-fp8": ("star full", f"star full, S <= {PAPER_STALENESS}"),
}
"""A star of full weights whose learner waits for most of the time: the plan says so, and minutes would confirm it."""

ASYNC_STEPS = 60

Verdict = Literal["confirmed", "refuted", ""]

HAND: dict[str, dict[str, tuple[float, float]]] = {
    "lab-4b": {
        "star full": (-0.17, -0.30),
        "relay full": (-0.13, -0.24),
        "star delta": (0.36, 0.30),
        "relay delta": (0.36, 0.29),
    },
    "volunteers-8b-fp8": {
        "star full": (-0.40, -0.75),
        "relay full": (-0.01, -0.26),
        "star delta": (0.48, 0.35),
        "relay delta": (0.48, 0.35),
    },
    "internet-32b-fp8": {
        "star full": (-0.34, -0.52),
        "relay full": (0.18, 0.07),
        "star delta": (0.40, 0.32),
        "relay delta": (0.40, 0.32),
    },
}
"""Savings by hand against `colocated` and `async_dc`, before any of this was built: ECHO-2's rule for samplers that
pause to fetch, S = 6, the cheapest set, with the rates of fp8. Those of full weights are held against the rows with
S <= 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a simulation gave after its warm-up. `start_cost`: what the warm-up cost beyond as many hours later on;
    `worst_hour_idle_share`: of any hour; `median_step_cost`: what a step costs while nothing unusual happens."""

    hours: float
    steps: int
    idle_share: float
    worst_hour_idle_share: float
    discarded_share: float
    mean_staleness: float
    step_s: float
    active: float
    broadcast_s: float
    cost_per_hour: float
    cost_per_step: float
    median_step_cost: float
    start_cost: float
    broadcast_gb_per_hour: float
    join_gb_per_hour: float
    joins: int
    left: int
    vanished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm of one scenario. Savings are shares of the baseline's cost per step: (colocated, async_dc)."""

    scenario: str
    name: str
    plan: Arm
    plan_saving: tuple[float, float]
    measured: Measured | None
    measured_saving: tuple[float, float] | None
    hand: tuple[float, float] | None

    @property
    def plan_verdict(self) -> Verdict:
        return "" if self.measured_saving is None else verdict(self.plan_saving[0], self.measured_saving[0])

    @property
    def hand_verdict(self) -> Verdict:
        if self.hand is None:
            return ""
        found = self.measured_saving or self.plan_saving
        both = [verdict(told, seen) for told, seen in zip(self.hand, found, strict=True)]
        return "confirmed" if both == ["confirmed", "confirmed"] else "refuted"

    @property
    def idle_share(self) -> float:
        return self.plan.idle_share if self.measured is None else self.measured.idle_share

    @property
    def is_equal(self) -> bool:
        """Whether the learner is as busy as in the baselines; if not, its stretched step is charged."""
        return self.idle_share <= (NEARLY_BUSY if self.measured is None else MAX_IDLE)

    @property
    def is_chosen(self) -> bool:
        return (self.name, self.plan.activate) == CHOSEN

    @property
    def is_met(self) -> bool:
        """Of the chosen arm: the target. A simulation has to show it."""
        return self.measured_saving is not None and self.measured_saving[0] >= TARGET_SAVING and self.is_equal


def verdict(told: float, seen: float) -> Verdict:
    return "confirmed" if abs(told - seen) <= NEAR else "refuted"


def savings(cost_per_step: float, references: Sequence[Reference]) -> tuple[float, float]:
    """Against `colocated` and `async_dc`, which each of the scenarios has."""
    by_name = {one.name: saving(cost_per_step, one) for one in references}
    return by_name["colocated"], by_name["async_dc"]


# -- simulations ---------------------------------------------------------------------------------------------------


def measure(scenario: Scenario, arm: Arm, *, hours: float, seed: int) -> Measured:
    """One arm on the virtual clock, with the settings of its plan."""
    settings = Settings(
        hours=hours,
        max_staleness=arm.max_staleness,
        publish_every_steps=arm.publish_every_steps,
        deltas=arm.payload == "delta",
        scheme="star" if arm.scheme == "star" else None,
    )
    rules = Rules(activate=arm.activate, least_margin=scenario.staleness.safety_margin - 1)
    simulation = CapacitySimulation(scenario, settings, seed=seed, choice=Choice(scenario, settings, rules))
    found = simulation.run()
    measured, happened = found.capacity, found.happened
    steps = simulation.timeline.steps
    return Measured(
        hours=found.hours,
        steps=measured.steps,
        idle_share=measured.idle_share,
        worst_hour_idle_share=worst_hour(steps, scenario.learner.train_step_s, begin_s=(hours - found.hours) * HOUR_S),
        discarded_share=measured.discarded_share,
        mean_staleness=measured.mean_staleness,
        step_s=measured.step_s,
        active=found.active,
        broadcast_s=found.broadcast_s,
        cost_per_hour=found.cost_per_hour,
        cost_per_step=found.cost_per_step,
        median_step_cost=median_cost(steps, begin_s=(hours - found.hours) * HOUR_S),
        start_cost=start_cost(steps, found.cost_per_hour, until_s=(hours - found.hours) * HOUR_S),
        broadcast_gb_per_hour=found.broadcast_bytes_per_hour / 1e9,
        join_gb_per_hour=found.join_bytes_per_hour / 1e9,
        joins=happened.joins,
        left=happened.left,
        vanished=happened.vanished,
    )


def start_cost(steps: Sequence[StepTaken], cost_per_hour: float, *, until_s: float) -> float:
    """What was spent until the last batch of the warm-up, less what as many hours cost later on."""
    begun = [step for step in steps if step.at_s <= until_s]
    return sum(step.cost for step in begun) - cost_per_hour * begun[-1].at_s / HOUR_S if begun else 0.0


def median_cost(steps: Sequence[StepTaken], *, begin_s: float) -> float:
    """Of the steps after the warm-up; 0 if there were none."""
    return median([step.cost for step in steps if step.at_s >= begin_s] or [0.0])


def worst_hour(steps: Sequence[StepTaken], train_step_s: float, *, begin_s: float) -> float:
    """The largest idle share of an hour's batches, after the warm-up. A wait counts for the hour in which it ends."""
    waits: dict[int, list[float]] = {}
    for step in steps:
        if step.at_s >= begin_s:
            waits.setdefault(int((step.at_s - begin_s) / HOUR_S), []).append(step.waited_s)
    return max((sum(hour) / (sum(hour) + train_step_s * len(hour)) for hour in waits.values()), default=1.0)


def async_idle(
    scenario: Scenario, reference: Reference, max_staleness: int, *, seed: int, steps: int = ASYNC_STEPS
) -> float:
    """The learner's idle share beside the baseline's GPUs, simulated, were versions there at once: the baseline is
    taken never to wait."""
    dc = scenario.baseline.async_dc
    assert dc is not None
    places = max(1, round(dc.tokens_per_s * scenario.rollout.tpot_s))
    rate = dc.tokens_per_s / lengths_of(scenario).mean
    workers = [Worker(name=f"g{i}", rollouts_per_s=rate, samples_at_once=places) for i in range(reference.gpus)]
    demand = demand_of(scenario, max_staleness=max_staleness, publish_every_steps=1)
    return run_fixed(demand, workers, [0.0] * len(workers), steps=steps, seed=seed).idle_share


def hours_of(scenario: str, name: str, activate: Activate, *, most: float) -> float:
    """Virtual hours for which an arm is simulated; 0 for none."""
    if (name, activate) == CHOSEN:
        return min(LONG_HOURS, most)
    if name in NOT_SIMULATED.get(scenario, ()) or (activate == "all" and name not in ALL_SIMULATED.get(scenario, ())):
        return 0.0
    return min(HOURS[scenario], most)


def rows_of(scenario: Scenario, *, max_hours: float, seed: int) -> Iterator[Row]:
    """All arms, the dearest kind first; each is simulated when it is asked for."""
    references = references_of(scenario)
    title = scenario.scenario.name
    plan = planned(scenario, idle_target=NEARLY_BUSY)
    for arm in with_bounded(scenario, plan.arms):
        name = arm_name(scenario, arm, plan.arms)
        hours = hours_of(title, name, arm.activate, most=max_hours)
        measured = measure(scenario, arm, hours=hours, seed=seed) if hours else None
        yield Row(
            scenario=title,
            name=name,
            plan=arm,
            plan_saving=savings(arm.cost_per_step, references),
            measured=measured,
            measured_saving=None if measured is None else savings(measured.cost_per_step, references),
            hand=hand_of(title, arm),
        )


def with_bounded(scenario: Scenario, arms: Sequence[Arm]) -> Iterator[Arm]:
    """And after each cheapest arm of full weights the one with the paper's bound, if it is beyond that."""
    bare = bounded(PAPER_STALENESS)(scenario).model_copy(update={"baseline": Baseline()})
    for arm in arms:
        yield arm
        if arm.payload == "full" and arm.activate == "cheapest" and arm.max_staleness > PAPER_STALENESS:
            yield cheapest_arm(bare, arm.scheme, "full")


def arm_name(scenario: Scenario, arm: Arm, arms: Sequence[Arm]) -> str:
    """Its own name; that of a bounded one says so."""
    return arm.name if any(arm is one for one in arms) else f"{arm.name}, S <= {PAPER_STALENESS}"


def hand_of(scenario: str, arm: Arm) -> tuple[float, float] | None:
    """The figures by hand are of the cheapest sets with S = 6; with deltas larger bounds change nothing."""
    if arm.activate == "all" or arm.max_staleness > PAPER_STALENESS:
        return None
    return HAND.get(scenario, {}).get(arm.name)
