"""What each sampler would cost and give, as far as it is known how versions reach it.

That depends on who else is active: the relay forest is planned for a set. Of samplers in the last set that was planned
the plan says it; of the others it is supposed that they fare like those of their class, or like all, and that the
version has to pass their own downlink.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from swarm.capacity.fleet import Demand, Disseminate, Dissemination, Worker
from swarm.capacity.prices import (
    HOUR_S,
    Offer,
    churn_variance,
    fault_of,
    missing_share,
    price_per_hour,
    usable_share,
    waiting_share,
)

UNMEASURED = "your rate is not known yet: it is measured when your turn comes to be tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one version reaches one sampler: seconds until it is installed, bytes that it receives and sends on."""

    install_s: float
    down_bytes: float
    up_bytes: float


NO_WAY_KNOWN = Way(install_s=0.0, down_bytes=0.0, up_bytes=0.0)
"""Before anything was planned: the first plan corrects it."""


class Market:
    """The samplers that may be chosen, and `refused`: why others may not. Names are unique."""

    def __init__(
        self, demand: Demand, workers: Sequence[Worker], disseminate: Disseminate, *, kept: Collection[str]
    ) -> None:
        self.demand = demand
        self.refused: dict[str, str] = {}
        self.workers: dict[str, Worker] = {}
        for worker in workers:
            fault = fault_of(worker) or (UNMEASURED if worker.rollouts_per_s == 0 else None)
            if fault is None:
                self.workers[worker.name] = worker
            else:
                self.refused[worker.name] = fault
        self._disseminate = disseminate
        self._kept = frozenset(kept)
        self._ways: dict[str, Way] = {}
        self._typical: dict[str | None, Way] = {None: NO_WAY_KNOWN}

    @property
    def versions_per_hour(self) -> float:
        """Of a learner that never waits."""
        return HOUR_S / (self.demand.publish_every_steps * self.demand.train_step_s)

    def plan(self, names: Sequence[str]) -> Dissemination:
        """How a version reaches this set."""
        if not names:
            return Dissemination(install_s=(), down_bytes=(), up_bytes=(), learner_up_bytes=0.0)
        return self._disseminate([self.workers[name] for name in names])

    def suppose(self, names: Sequence[str], plan: Dissemination) -> None:
        """From now on reckon with `plan`, for the samplers in it and as typical for the others."""
        by_class: dict[str | None, list[Way]] = {}
        for name, install_s, down, up in zip(names, plan.install_s, plan.down_bytes, plan.up_bytes, strict=True):
            way = self._ways[name] = Way(install_s=install_s, down_bytes=down, up_bytes=up)
            by_class.setdefault(self.workers[name].device_class, []).append(way)
            by_class.setdefault(None, []).append(way)
        self._typical.update({name: _median_way(members) for name, members in by_class.items()})

    def way_of(self, worker: Worker) -> Way:
        """As planned, or as supposed of one that was in no plan."""
        if (known := self._ways.get(worker.name)) is not None:
            return known
        like = self._typical.get(worker.device_class, self._typical[None])
        if worker.downlink_bytes_per_s <= 0:
            return like
        own_s = like.down_bytes / worker.downlink_bytes_per_s
        return Way(install_s=max(like.install_s, own_s), down_bytes=like.down_bytes, up_bytes=like.up_bytes)

    def offers(self) -> list[Offer]:
        """Of all who would contribute, the cheapest per rollout first; of equal ones those that are kept, then the
        faster. Where none of them could be in time (S = 0) all are there, by how little they delay a step."""
        offers = self._offers(waiting=False) or self._offers(waiting=True)
        return sorted(offers, key=lambda o: (o.ratio, o.name not in self._kept, -o.useful_rollouts_per_s, o.name))

    def _offers(self, *, waiting: bool) -> list[Offer]:
        offers = [self.offer(worker, waiting=waiting) for worker in self.workers.values()]
        return [offer for offer in offers if offer.useful_rollouts_per_s > 0]

    def offer(self, worker: Worker, *, waiting: bool = False) -> Offer:
        """`waiting`: reckon with a learner that waits for every version."""
        way = self.way_of(worker)
        share_of = waiting_share if waiting else usable_share
        present = worker.rollouts_per_s * share_of(self.demand, install_s=way.install_s, place_s=worker.place_s)
        missing = self.missing_share(worker)
        return Offer(
            name=worker.name,
            price_per_hour=self.price_per_hour(worker),
            useful_rollouts_per_s=present * (1.0 - missing),
            variance=churn_variance(present, missing),
        )

    def price_per_hour(self, worker: Worker) -> float:
        way = self.way_of(worker)
        return price_per_hour(
            worker, down_bytes=way.down_bytes, up_bytes=way.up_bytes, versions_per_hour=self.versions_per_hour
        )

    def missing_share(self, worker: Worker) -> float:
        """A loss is noticed and decided upon within a publication period; then another one starts."""
        period_s = self.demand.publish_every_steps * self.demand.train_step_s
        return missing_share(departures_per_hour=worker.departures_per_hour, replace_s=worker.start_s + period_s)


def _median_way(ways: Sequence[Way]) -> Way:
    return Way(
        install_s=median(way.install_s for way in ways),
        down_bytes=median(way.down_bytes for way in ways),
        up_bytes=median(way.up_bytes for way in ways),
    )
