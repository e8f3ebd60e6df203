"""Activation over hundreds of decisions: under noise, losses, joins and a liar, as the estimator hears of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from swarm.pay.activation import DWELL_DECISIONS, Activation
from swarm.pay.estimator import Estimator, StartValues
from swarm.pay.fleet import Disseminate, Dissemination, Terms, Worker
from swarm.pay.selection import Rules
from tests.capacity import by_downlink, decided, demand, random_fleet, worker

pytestmark = pytest.mark.slow

DECISIONS = 500

SETTLING = 60

Noise = Callable[[Random], float]


def uniform(random: Random) -> float:
    return random.uniform(0.9, 1.1)


def normal(random: Random) -> float:
    return max(0.5, random.gauss(1.0, 0.1))


def noisy_plan(noise: Noise, random: Random) -> Disseminate:
    def disseminate(workers: Sequence[Worker]) -> Dissemination:
        plan = by_downlink(workers)
        return replace(plan, install_s=tuple(own_s * noise(random) for own_s in plan.install_s))

    return disseminate


@pytest.mark.long
@pytest.mark.parametrize(
    ("noise", "max_staleness", "seed"), [(uniform, 1, 1), (uniform, 3, 2), (normal, 1, 3), (normal, 3, 4)]
)
def test_nothing_flaps_at_ten_percent_noise_in_every_figure(noise: Noise, max_staleness: int, seed: int) -> None:
    random = Random(seed)
    fleet = random_fleet(60, random)
    wanted = demand(groups=160, max_staleness=max_staleness)
    activation = Activation(Rules())
    changed = []
    for number in range(DECISIONS):
        rates = [replace(one, rollouts_per_s=one.rollouts_per_s * noise(random)) for one in fleet]
        step = replace(wanted, train_step_s=wanted.train_step_s * noise(random))
        if decided(activation, step, rates, noisy_plan(noise, random), now=120.0 * number):
            changed.append(number)
    assert 0 < len(activation.active) < 60
    assert len([number for number in changed if number >= SETTLING]) <= 2


@dataclass
class Swarm:
    """Samplers that work, as an estimator hears of them: 10 % noise in all it is told. Who waits does not work."""

    fleet: list[Worker]
    random: Random
    share: float = 0.85
    """Of its rate that pacing lets a sampler work."""

    estimator: Estimator = field(default_factory=lambda: Estimator(StartValues(departures_per_hour=0.005)))
    activation: Activation = field(default_factory=lambda: Activation(Rules()))
    claims: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    period_s: float = 120.0

    def __post_init__(self) -> None:
        for one in self.fleet:
            self.join(one)

    def join(self, one: Worker) -> None:
        self.estimator.joined(one.name, Terms(one.device_class, (one.cost_per_hour, 0.0, 0.0)), now=self.now)
        self.estimator.link(one.name, 0.0, one.downlink_bytes_per_s, False)

    def period(self) -> bool:
        """One publication period: work, measure, decide. Whether anything changed."""
        self.now += self.period_s
        self.estimator.trained(self.period_s * uniform(self.random))
        for one in self.fleet:
            if one.name not in self.activation.active:
                continue
            done = one.rollouts_per_s * self.period_s * self.share * uniform(self.random)
            tokens = [max(1, round(self.random.lognormvariate(7.5, 0.9))) for _ in range(round(done))]
            self.estimator.generated(one.name, tokens, now=self.now)
            claim = self.claims.get(one.name, one.rollouts_per_s) * uniform(self.random)
            self.estimator.rate(one.name, claim, one.samples_at_once, False)
        return self.decide()

    def decide(self) -> bool:
        wanted = self.estimator.demand(
            groups_per_step=64, group_size=8, publish_every_steps=1, max_staleness=3, freshness="adaptive"
        )
        workers = self.estimator.workers(self.now)
        changes = decided(self.activation, wanted, workers, by_downlink, now=self.now)
        for node, is_active in changes:
            (self.estimator.activated if is_active else self.estimator.stood_by)(node, now=self.now)
        return bool(changes)

    def periods(self, count: int) -> int:
        """How many of them changed anything."""
        return sum(self.period() for _ in range(count))

    @property
    def true_rate(self) -> float:
        return sum(one.rollouts_per_s for one in self.fleet if one.name in self.activation.active)


NEEDED = 512 / 120


def cards(count: int, rate: float, cost: float, name: str) -> list[Worker]:
    return [worker(f"{name}{number}", rate, cost, device_class=name) for number in range(count)]


def settled(fleet: list[Worker], seed: int, **more: dict[str, float]) -> Swarm:
    swarm = Swarm(fleet=fleet, random=Random(seed), **more)  # type: ignore[arg-type]
    swarm.decide()
    assert swarm.activation.active == {one.name for one in fleet}
    swarm.periods(SETTLING)
    return swarm


def test_from_a_start_in_which_nothing_is_known_the_cheapest_remain_and_stay() -> None:
    swarm = settled([*cards(20, 0.3, 0.2, "cheap"), *cards(20, 0.5, 0.9, "dear")], 1)
    assert {name[:4] for name in swarm.activation.active} == {"chea"}
    assert NEEDED * 0.97 <= swarm.true_rate <= NEEDED * 1.3
    assert swarm.periods(80) <= 2


def test_a_third_lost_is_replaced_at_once_and_nothing_flaps_after_it() -> None:
    swarm = settled([*cards(20, 0.3, 0.2, "cheap"), *cards(20, 0.5, 0.9, "dear")], 2)
    lost = set(sorted(swarm.activation.active)[::3])
    for name in lost:
        swarm.estimator.left(name, vanished=True, now=swarm.now)
    swarm.fleet = [one for one in swarm.fleet if one.name not in lost]
    assert swarm.decide()
    assert swarm.true_rate >= NEEDED * 0.97
    assert swarm.periods(40) <= 2


def test_cheaper_samplers_that_join_are_tried_and_replace_dear_ones() -> None:
    swarm = settled(cards(20, 0.4, 0.9, "dear"), 3)
    new = cards(20, 0.3, 0.1, "cheap")
    swarm.fleet = [*swarm.fleet, *new]
    for one in new:
        swarm.join(one)
    swarm.periods(4 * DWELL_DECISIONS)
    assert {name[:4] for name in swarm.activation.active} == {"chea"}
    assert swarm.true_rate >= NEEDED * 0.97
    assert swarm.periods(40) <= 2


def test_a_liar_gains_nothing_for_long() -> None:
    """One of forty says that it makes a billion rollouts a second; the others are still rented."""
    swarm = settled(cards(40, 0.3, 0.2, "card"), 4, claims={"card7": 1e9})
    honest = sum(one.rollouts_per_s for one in swarm.fleet if one.name in swarm.activation.active - {"card7"})
    assert honest >= NEEDED * 0.9
    told = {one.name: one.rollouts_per_s for one in swarm.estimator.workers(swarm.now)}
    assert told["card7"] <= 0.7
