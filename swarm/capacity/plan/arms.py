"""One way to run a scenario: how versions travel, which settings, which samplers are active, and what it costs.

The bound S and the period kappa are chosen in two stages, because a choice of samplers takes seconds. First each pair
is ranked by the predicted cost of a step with the cheapest samplers, about as many as will be active. Then the best
pairs are planned fully. Among those of about the same cost the smallest bound wins: fresher rollouts learn better.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.capacity.delivery import sustained
from swarm.capacity.fleet import GB, Demand, Disseminate, Worker
from swarm.capacity.model import Binds, predict
from swarm.capacity.plan.scenario import Scenario, delta_bytes, demand_of
from swarm.capacity.prices import HOUR_S, start_per_hour, traffic_per_hour
from swarm.capacity.selection import Rules, Search

Scheme = Literal["star", "relay"]
Payload = Literal["full", "delta"]
Activate = Literal["all", "cheapest"]

Broadcasts = Callable[[Scheme, float], Disseminate]
"""Returns how versions of this size reach samplers, by the swarm's own plan or from the learner alone."""

TYPICAL = 1.5
"""Rate of the cheapest samplers, in R / T, with which settings are ranked: about what is chosen in the end."""

LONGEST_PERIOD = 16
"""Longest period between versions, in steps: rarer ones save little more traffic, and each pair takes 50 ms to try."""

CLOSE = 1.05
"""The search ends within this factor of the least estimate: estimates ignore churn and that samplers are whole."""

MAX_PLANNED = 3  # Settings of one arm that are planned fully: each takes up to some seconds
AS_CHEAP = 1.01  # Costs per step within this factor count as equal: prices are not known better


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """S and kappa."""

    max_staleness: int
    publish_every_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The choice and its figures. Prices per hour: `rent` of samplers and their starts, `traffic` of samplers and
    learner, and `learner`; `cost_per_hour` is their sum. `feasible`: idle within the target."""

    scheme: Scheme
    payload: Payload
    activate: Activate
    max_staleness: int
    publish_every_steps: int
    version_bytes: float
    active: tuple[str, ...]
    by_class: dict[str, int]
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
    feasible: bool

    @property
    def name(self) -> str:
        return f"{self.scheme} {self.payload}"

    @property
    def setting(self) -> Setting:
        return Setting(max_staleness=self.max_staleness, publish_every_steps=self.publish_every_steps)


class ArmPlanner:
    """Plans arms of one scenario over the same workers."""

    def __init__(
        self, scenario: Scenario, workers: Sequence[Worker], broadcasts: Broadcasts, *, idle_target: float
    ) -> None:
        self.scenario = scenario
        self.workers = tuple(workers)
        self.idle_target = idle_target
        self.broadcasts = broadcasts

    def cheapest(self, scheme: Scheme, payload: Payload) -> Arm:
        """Return the arm whose settings and active set have the least cost per step."""
        ranked = self._ranked(scheme, payload)
        least_estimate = min(estimate for estimate, _ in ranked)
        arms: list[Arm] = []
        for _, setting in ranked[:MAX_PLANNED]:
            arms.append(self.arm(scheme, payload, setting, "cheapest"))
            if arms[-1].cost_per_step <= CLOSE * least_estimate:
                break
        least = min(arm.cost_per_step for arm in arms)
        near = [arm for arm in arms if arm.cost_per_step <= AS_CHEAP * least]
        return min(near, key=lambda arm: (arm.max_staleness, arm.cost_per_step))

    def arm(self, scheme: Scheme, payload: Payload, setting: Setting, activate: Activate) -> Arm:
        """Choose the active set for these settings."""
        disseminate = self.disseminate(scheme, payload, setting)
        selection = Search(self.demand(setting), self.workers, disseminate, self.rules(activate)).select()
        chosen = [worker for worker in self.workers if worker.name in set(selection.active)]
        return self.arm_of(scheme, payload, setting, activate, chosen)

    def arm_of(
        self, scheme: Scheme, payload: Payload, setting: Setting, activate: Activate, chosen: Sequence[Worker]
    ) -> Arm:
        """Return the arm with exactly these workers."""
        plan = self.disseminate(scheme, payload, setting)(chosen)
        prediction = predict(self.demand(setting), chosen, plan.install_s)
        versions_per_hour = HOUR_S / (setting.publish_every_steps * prediction.step_s)
        traffic = sum(
            traffic_per_hour(worker, down_bytes=down, up_bytes=up, versions_per_hour=versions_per_hour)
            for worker, down, up in zip(chosen, plan.down_bytes, plan.up_bytes, strict=True)
        )
        learner = self.scenario.learner
        traffic += versions_per_hour * plan.learner_up_bytes / GB * learner.egress_usd_per_gb
        rent = sum(worker.cost_per_hour + start_per_hour(worker) for worker in chosen)
        cost_per_hour = rent + traffic + learner.price_per_h
        return Arm(
            scheme=scheme,
            payload=payload,
            activate=activate,
            max_staleness=setting.max_staleness,
            publish_every_steps=setting.publish_every_steps,
            version_bytes=self.version_bytes(payload, setting),
            active=tuple(worker.name for worker in chosen),
            by_class=dict(Counter(worker.device_class for worker in chosen)),
            rollouts_per_s=sum(worker.rollouts_per_s for worker in chosen),
            broadcast_s=plan.broadcast_s,
            idle_share=prediction.idle_share,
            discarded_share=prediction.discarded_share,
            mean_staleness=prediction.mean_staleness,
            step_s=prediction.step_s,
            binds=prediction.binds,
            rent_per_hour=rent,
            traffic_per_hour=traffic,
            learner_per_hour=learner.price_per_h,
            cost_per_hour=cost_per_hour,
            cost_per_step=cost_per_hour * prediction.step_s / HOUR_S,
            feasible=prediction.idle_share <= self.idle_target,
        )

    def demand(self, setting: Setting) -> Demand:
        return demand_of(
            self.scenario,
            max_staleness=setting.max_staleness,
            publish_every_steps=setting.publish_every_steps,
        )

    def rules(self, activate: Activate = "cheapest") -> Rules:
        margin = self.scenario.staleness.safety_margin - 1
        return Rules(activate=activate, idle_target=self.idle_target, least_margin=margin)

    def version_bytes(self, payload: Payload, setting: Setting) -> float:
        if payload == "full":
            return self.scenario.model.bytes_bf16
        return delta_bytes(self.scenario, setting.publish_every_steps)

    def disseminate(self, scheme: Scheme, payload: Payload, setting: Setting) -> Disseminate:
        once = self.broadcasts(scheme, self.version_bytes(payload, setting))
        period_s = setting.publish_every_steps * self.scenario.learner.train_step_s
        return sustained(once, period_s=period_s)

    # -- settings ---------------------------------------------------------------------------------------------

    def _ranked(self, scheme: Scheme, payload: Payload) -> list[tuple[float, Setting]]:
        """Return the best setting of each bound with its estimated cost. The cheapest come first; among about equal
        costs, the smallest bound."""
        cheapest = self._cheapest_workers()
        best: dict[int, tuple[float, Setting]] = {}
        for setting in settings_of(self.scenario):
            estimate = self._estimate(self.arm_of(scheme, payload, setting, "cheapest", cheapest))
            if estimate * AS_CHEAP < best.get(setting.max_staleness, (math.inf, setting))[0]:
                best[setting.max_staleness] = (estimate, setting)
        least = min(estimate for estimate, _ in best.values())
        return sorted(best.values(), key=lambda one: (max(one[0], AS_CHEAP * least), one[1].max_staleness))

    def _estimate(self, typical: Arm) -> float:
        """Estimate the cost of a step, with only a part of the cheapest samplers if they are more than enough."""
        if not typical.feasible:
            return typical.cost_per_step
        learner = self.scenario.learner
        needed = self.scenario.staleness.safety_margin * learner.rollouts_per_step / learner.train_step_s
        part = min(1.0, needed / typical.rollouts_per_s)
        price = typical.learner_per_hour + part * (typical.cost_per_hour - typical.learner_per_hour)
        return price * typical.step_s / HOUR_S

    def _cheapest_workers(self) -> list[Worker]:
        """Return the cheapest samplers per rollout, about as many as will be active."""
        needed = TYPICAL * self.scenario.learner.rollouts_per_step / self.scenario.learner.train_step_s
        chosen: list[Worker] = []
        for worker in sorted(self.workers, key=lambda one: one.cost_per_hour / one.rollouts_per_s):
            if sum(one.rollouts_per_s for one in chosen) >= needed:
                break
            chosen.append(worker)
        return chosen


def settings_of(scenario: Scenario) -> list[Setting]:
    """Return the pairs of S and kappa to choose from: every kappa up to S + 1 and LONGEST_PERIOD, or only S - 1 under
    the paper's rule."""
    rule = scenario.staleness.kappa_rule
    return [
        Setting(max_staleness=bound, publish_every_steps=period)
        for bound in sorted(set(scenario.staleness.S))
        for period in (range(1, min(bound + 1, LONGEST_PERIOD) + 1) if rule == "safe" else [max(1, bound - 1)])
    ]
