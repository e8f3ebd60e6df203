"""Fleets for tests of capacity, ways in which versions reach them, and the rate condition as a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

from swarm.pay.activation import Activation
from swarm.pay.fleet import Demand, Disseminate, Dissemination, Lengths, Worker

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


Change = tuple[str, bool]
"""A sampler, and whether it is active now."""


def decided(
    activation: Activation,
    demand: Demand | None,
    workers: Sequence[Worker],
    disseminate: Disseminate,
    *,
    now: float,
    idle_share: float | None = None,
) -> list[Change]:
    """Decide, and return what changed for those who are there."""
    before = activation.active
    activation.decide(demand, workers, disseminate, now=now, idle_share=idle_share)
    return [(one.name, one.name in activation.active) for one in workers if one.name in before ^ activation.active]


def subsets(workers: Sequence[Worker]) -> list[tuple[Worker, ...]]:
    """All of them, the empty one included."""
    return [chosen for count in range(len(workers) + 1) for chosen in combinations(workers, count)]
