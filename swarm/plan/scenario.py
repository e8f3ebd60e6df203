"""A scenario: a learner, its rollouts, and a fleet that could be rented or admitted, as docs/scenarios.md describes.

Link rates are in Mbit/s, prices in one currency per hour, traffic prices per GB (1e9 bytes). User input is checked here
alone: the rates of a Scenario are positive and its prices are numbers.
"""

from __future__ import annotations

import math
from random import Random
from statistics import NormalDist
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swarm.pay.delivery import disseminate_by
from swarm.pay.fleet import Demand, Disseminate, Lengths, Worker
from swarm.types import Freshness

BYTES_PER_MBIT = 1e6 / 8

MAX_NODES = 10_000
"""Nodes of one class. Planning takes seconds for a thousand; ten times that exceeds any swarm on record."""

MAX_CLASSES = 64

GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, are spread evenly, in an order that is unrelated to any other quantity."""

Positive = Annotated[float, Field(strict=True, gt=0, le=1e15)]
Price = Annotated[float, Field(strict=True, ge=0, le=1e6)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
PositiveShare = Annotated[float, Field(strict=True, gt=0, le=1)]
Duration = Annotated[float, Field(strict=True, ge=0, le=1e7)]
Spread = Annotated[float, Field(strict=True, ge=0, le=4)]
Hours = Annotated[float, Field(strict=True, gt=0, le=1e5)]
Number = Annotated[int, Field(strict=True, ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.+ -]+$")]
Text = Annotated[str, Field(max_length=200)]


class ScenarioTable(BaseModel):
    """A table of the file. Unknown keys, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class About(ScenarioTable):
    """[scenario]. `currency` and `prices_as_of` are only printed."""

    name: Name
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    prices_as_of: Text = ""


class ModelTable(ScenarioTable):
    """[model]. `bytes_bf16`: one full version. `load_s`: from the bytes on disk to the first sample. The others are
    only printed."""

    name: Text
    params: Positive
    bytes_bf16: Positive
    load_s: Duration


class Delta(ScenarioTable):
    """[delta]: a patch over k learner steps has bytes_bf16 * f1 * k ** exp bytes, at most the full model's. `apply_s`:
    from the last byte of a version to the first token with it."""

    f1: PositiveShare
    exp: Share
    apply_s: Duration


class LearnerTable(ScenarioTable):
    """[learner]. `train_step_s`, when it never waits, and `price_per_h` are for all its GPUs together.
    `egress_usd_per_gb` is for the bytes that it sends. `steps_per_point`: for a percentage point of held-out
    accuracy, as the status of a like run says. `hardware` is only printed."""

    hardware: Text = ""
    price_per_h: Price
    train_step_s: Positive
    rollouts_per_step: Number
    group_size: Number
    up_mbps: Positive
    down_mbps: Positive
    egress_usd_per_gb: Price = 0.0
    steps_per_point: Positive | None = None

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.rollouts_per_step % self.group_size:
            raise ValueError(
                f"rollouts_per_step {self.rollouts_per_step} is no multiple of group_size {self.group_size}"
            )
        return self


class RolloutTable(ScenarioTable):
    """[rollout]: lengths of completions in tokens, lognormal and cut at `cap`. `tpot_s`: seconds per token of one
    sequence while its engine is full. `upload_bytes_per_token`: what a rollout sends to the learner. For the reader:
    `prompt_tokens`, and `mu`, the logarithm of the median."""

    dist: Literal["lognormal"] = "lognormal"
    median: Positive
    sigma: Spread
    cap: Positive
    tpot_s: Positive
    prompt_tokens: Duration = 0.0
    upload_bytes_per_token: Positive = 6.0
    mu: Annotated[float, Field(strict=True)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cap < self.median:
            raise ValueError(f"cap {self.cap:g} is below the median {self.median:g}")
        if self.mu is not None and abs(self.mu - math.log(self.median)) > 0.01:
            raise ValueError(f"mu {self.mu:g} is not the logarithm of the median, {math.log(self.median):.3f}")
        return self


class Staleness(ScenarioTable):
    """[staleness]. `S`: the bounds to choose from. `kappa_rule`: publish as rarely as is cheapest while even a late
    rollout is fresh enough ("safe"), or every S - 1 steps like ECHO-2 ("paper"). `safety_margin`: available over needed
    rate, to cover churn and replaced groups. `freshness`: as in the settings of `lead`."""

    S: Annotated[tuple[Annotated[int, Field(strict=True, ge=0, le=1024)], ...], Field(min_length=1, max_length=8)]
    kappa_rule: Literal["safe", "paper"] = "safe"
    safety_margin: Annotated[float, Field(strict=True, ge=1, le=10)] = 1.0
    freshness: Freshness = "adaptive"


class FleetClass(ScenarioTable):
    """[[fleet]]: nodes of one kind. `tokens_per_s`: of one node with this model and all places filled, which the room
    for its cache decides. Lines are lognormal (sigma 0: all alike). `duty`: the share of a day that a node is present;
    it stays for `mean_session_h` at a time and vanishes without notice every `mtbf_h`. `reachable`: the share that
    others can dial. A `volunteer` is paid only for work and stays ready; a rented machine is paid from its start to its
    end. For the reader: `gpu`, `tokens_per_s_bf16`, `rtt_ms`."""

    name: Name
    gpu: Text = ""
    count: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]
    tokens_per_s: Positive
    tokens_per_s_bf16: Positive | None = None
    price_per_h: Price
    volunteer: Annotated[bool, Field(strict=True)] = False
    down_mbps_median: Positive
    down_sigma: Spread = 0.0
    up_mbps_median: Positive
    up_sigma: Spread = 0.0
    down_usd_per_gb: Price
    up_usd_per_gb: Price
    reachable: Share
    duty: PositiveShare = 1.0
    mean_session_h: Hours
    mtbf_h: Hours
    rtt_ms: Duration = 0.0

    @property
    def online(self) -> int:
        """How many are present at a time."""
        return max(1, round(self.count * self.duty))


class Colocated(ScenarioTable):
    """[baseline.colocated]: one machine that generates, switches and trains in turn."""

    gpus: Number
    price_per_h: Price
    gen_s: Positive
    train_s: Positive
    switch_s: Duration


class AsyncDc(ScenarioTable):
    """[baseline.async_dc]: whole data-centre GPUs beside the learner, at `margin` times the rate it needs."""

    gpu: Text = ""
    tokens_per_s: Positive
    price_per_h: Price
    margin: Annotated[float, Field(strict=True, ge=1, le=10)] = 1.0


class Baseline(ScenarioTable):
    """[baseline]: what the swarm is compared with."""

    colocated: Colocated | None = None
    async_dc: AsyncDc | None = None


class Departure(ScenarioTable):
    """[[simulation.departures]]: all nodes of `fleet` vanish at `at_h` within `within_s`, and come back one by one."""

    fleet: Name
    at_h: Annotated[float, Field(strict=True, ge=0, le=1e5)]
    within_s: Duration = 180.0


class Simulated(ScenarioTable):
    """[simulation]: what `simulate` does beyond the rest of the file."""

    hours: Hours = 24.0
    departures: Annotated[tuple[Departure, ...], Field(max_length=100)] = ()


class Scenario(ScenarioTable):
    """The whole file."""

    scenario: About
    model: ModelTable
    delta: Delta
    learner: LearnerTable
    rollout: RolloutTable
    staleness: Staleness
    fleet: Annotated[tuple[FleetClass, ...], Field(min_length=1, max_length=MAX_CLASSES)]
    baseline: Baseline = Baseline()
    simulation: Simulated = Simulated()

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        names = [one.name for one in self.fleet]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two classes of the fleet are named {twice}")
        for departure in self.simulation.departures:
            if departure.fleet not in names:
                raise ValueError(
                    f"simulation.departures: no class of the fleet is named {departure.fleet}: {', '.join(names)}"
                )
        return self


def lengths_of(scenario: Scenario) -> Lengths:
    """Return the lengths of completions, in tokens."""
    rollout = scenario.rollout
    return Lengths.lognormal(median=rollout.median, sigma=rollout.sigma, cap=rollout.cap)


def delta_bytes(scenario: Scenario, steps_apart: int) -> float:
    """Return the bytes of the patch between two versions that are `steps_apart` learner steps apart."""
    delta, full = scenario.delta, scenario.model.bytes_bf16
    return min(full, full * delta.f1 * math.pow(steps_apart, delta.exp))


def deltas_to(scenario: Scenario, steps_apart: int) -> Disseminate:
    """Return how a delta over that many steps reaches the samplers, by the swarm's own broadcast plan."""
    return disseminate_by(
        learner_uplink_bytes_per_s=scenario.learner.up_mbps * BYTES_PER_MBIT,
        encoded_bytes=delta_bytes(scenario, steps_apart),
        apply_s=scenario.delta.apply_s,
    )


def demand_of(scenario: Scenario, *, max_staleness: int, publish_every_steps: int) -> Demand:
    """Return what the learner needs at this bound and period."""
    learner = scenario.learner
    return Demand(
        train_step_s=learner.train_step_s,
        groups_per_step=learner.rollouts_per_step // learner.group_size,
        group_size=learner.group_size,
        publish_every_steps=publish_every_steps,
        max_staleness=max_staleness,
        lengths=lengths_of(scenario),
        freshness=scenario.staleness.freshness,
    )


def online_of(scenario: Scenario, *, random: Random | None) -> list[Worker]:
    """Return as many workers of each class as are present at a time. `random` draws their links; without it they are
    the class's quantiles, the same every time."""
    return [worker for one in scenario.fleet for worker in class_workers(scenario, one, one.online, random=random)]


def class_workers(scenario: Scenario, one: FleetClass, count: int, *, random: Random | None) -> list[Worker]:
    """Return `count` nodes of a class, named CLASS-0 and so on."""
    mean_tokens = lengths_of(scenario).mean
    workers = []
    for number, (down_bytes_per_s, up_bytes_per_s, public) in enumerate(_links(one, count, random)):
        first_version_s = scenario.model.bytes_bf16 / min(down_bytes_per_s, scenario.learner.up_mbps * BYTES_PER_MBIT)
        workers.append(
            Worker(
                name=f"{one.name}-{number}",
                device_class=one.name,
                rollouts_per_s=one.tokens_per_s / mean_tokens,
                samples_at_once=max(1, round(one.tokens_per_s * scenario.rollout.tpot_s)),
                cost_per_hour=one.price_per_h,
                down_cost_per_gb=one.down_usd_per_gb,
                up_cost_per_gb=one.up_usd_per_gb,
                uplink_bytes_per_s=up_bytes_per_s,
                downlink_bytes_per_s=down_bytes_per_s,
                public=public,
                start_s=scenario.model.load_s + first_version_s,
                departures_per_hour=1 / one.mtbf_h,
            )
        )
    return workers


def _links(one: FleetClass, count: int, random: Random | None) -> list[tuple[float, float, bool]]:
    """Return each node's downlink and uplink in bytes/s, and whether it can be dialled."""
    if random is not None:
        return [
            (
                one.down_mbps_median * BYTES_PER_MBIT * random.lognormvariate(0, one.down_sigma),
                one.up_mbps_median * BYTES_PER_MBIT * random.lognormvariate(0, one.up_sigma),
                random.random() < one.reachable,
            )
            for _ in range(count)
        ]
    downs = _quantiles(one.down_mbps_median, one.down_sigma, count)
    ups = _quantiles(one.up_mbps_median, one.up_sigma, count)
    order = sorted(range(count), key=lambda i: i * GOLDEN % 1)
    publics = [int((i + 1) * one.reachable + 0.5) > int(i * one.reachable + 0.5) for i in range(count)]
    return [(downs[i], ups[order[i]], publics[i]) for i in range(count)]


def _quantiles(median_mbps: float, sigma: float, count: int) -> list[float]:
    """Return the middles of `count` equally likely slices of a lognormal, in bytes/s, ascending."""
    normal = NormalDist()
    return [median_mbps * BYTES_PER_MBIT * math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
