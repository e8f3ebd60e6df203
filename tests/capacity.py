"""Fleets for tests of capacity, ways in which versions reach them, and the rate condition as a model of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from random import Random

from swarm.capacity.fleet import Demand, Disseminate, Dissemination, Lengths, Worker
from swarm.capacity.model import Prediction
from swarm.capacity.prices import usable_share

VERSION_BYTES = 80e6


def demand(
    *, groups: int = 64, group_size: int = 8, train_step_s: float = 120.0, max_staleness: int = 6, period: int = 1
) -> Demand:
    return Demand(
        train_step_s=train_step_s,
        groups_per_step=groups,
        group_size=group_size,
        publish_every_steps=period,
        max_staleness=max_staleness,
        lengths=Lengths.lognormal(median=1800, sigma=0.9, cap=8192),
    )


def worker(
    name: str,
    rate: float,
    cost: float,
    *,
    places: int = 10,
    device_class: str = "",
    metered: float = 0.0,
    start_s: float = 300.0,
    departures_per_hour: float = 0.0,
    downlink: float = 100e6,
) -> Worker:
    return Worker(
        name=name,
        device_class=device_class,
        rollouts_per_s=rate,
        samples_at_once=places,
        cost_per_hour=cost,
        down_cost_per_gb=metered,
        downlink_bytes_per_s=downlink,
        start_s=start_s,
        departures_per_hour=departures_per_hour,
    )


def random_fleet(count: int, random: Random) -> list[Worker]:
    """Cards of all kinds: price per rollout within a factor of six, rates within one of ten, some of them metered."""
    fleet = []
    for number in range(count):
        rate = random.uniform(0.1, 1.0)
        price = rate * random.lognormvariate(0.0, 0.45)
        metered = random.choice((0.0, 0.0, 0.05))
        downlink = random.uniform(5e6, 200e6)
        leaving = random.choice((0.0, 0.02, 0.1))
        fleet.append(
            worker(f"n{number:03}", rate, price, metered=metered, downlink=downlink, departures_per_hour=leaving)
        )
    return fleet


def by_downlink(workers: Sequence[Worker]) -> Dissemination:
    """Everybody from the learner, whose uplink never binds: an install depends on the sampler alone."""
    return Dissemination(
        install_s=tuple(2.0 + VERSION_BYTES / one.downlink_bytes_per_s for one in workers),
        down_bytes=(VERSION_BYTES,) * len(workers),
        up_bytes=(0.0,) * len(workers),
        learner_up_bytes=VERSION_BYTES * len(workers),
    )


def star(uplink_bytes_per_s: float, version_bytes: float = VERSION_BYTES) -> Disseminate:
    """Everybody from the learner, whose uplink they share."""

    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        install_s = 2.0 + len(workers) * version_bytes / uplink_bytes_per_s
        return Dissemination(
            install_s=(install_s,) * len(workers),
            down_bytes=(version_bytes,) * len(workers),
            up_bytes=(0.0,) * len(workers),
            learner_up_bytes=version_bytes * len(workers),
        )

    return disseminate


class RateCondition:
    """mu >= R / min(T, (S + 1 - kappa) T - L), each sampler with its own L: a model whose least rate is exact."""

    def useful(self, demand: Demand, workers: Sequence[Worker], install_s: Sequence[float]) -> float:
        return sum(
            one.rollouts_per_s * usable_share(demand, install_s=own_s, place_s=one.place_s)
            for one, own_s in zip(workers, install_s, strict=True)
        )

    def predict(self, demand: Demand, workers: Sequence[Worker], install_s: Sequence[float], /) -> Prediction:
        needed = demand.rollouts_per_step / demand.train_step_s
        idle = max(0.0, 1.0 - self.useful(demand, workers, install_s) / needed)
        step_s = demand.train_step_s / (1.0 - idle) if idle < 1 else math.inf
        return Prediction(
            idle_share=idle,
            discarded_share=0.0,
            mean_staleness=1.0,
            step_s=step_s,
            rollouts_per_s=demand.rollouts_per_step / step_s,
            samplers_idle_share=0.0,
            binds="rate" if idle else "learner",
        )

    def mu_min(
        self, demand: Demand, workers: Sequence[Worker], install_s: Sequence[float], /, *, idle_target: float
    ) -> float:
        useful = self.useful(demand, workers, install_s)
        needed = demand.rollouts_per_step / demand.train_step_s * (1.0 - idle_target)
        return sum(one.rollouts_per_s for one in workers) * needed / useful if useful else math.inf

    def shortfall(self, demand: Demand, /, *, broadcast_s: float, generation_s: float) -> str | None:
        return None


def subsets(workers: Sequence[Worker]) -> list[tuple[Worker, ...]]:
    """All of them, the empty one included."""
    return [chosen for count in range(len(workers) + 1) for chosen in combinations(workers, count)]
