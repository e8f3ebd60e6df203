"""What a simulated swarm is like: one frozen record, the named ones, and the random ones of a seed.

Times are virtual seconds. A node's own speed and broadcast delay are drawn once per node around the scenario's means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Literal, cast

from swarm.join.link import MAX_BACK_OFF_S
from swarm.rollout.plane.nodes import MISSED_BEATS
from swarm.rollout.plane.plane import RETURN_S
from swarm.types import NodeId, Selection

RANDOM = "random"
UNLIMITED_HOLD = "unlimited-hold"
"""Names of the scenarios that a seed draws for itself: any at all, and those of I7."""

PATIENCE = 4.0
"""The liveness limit is this many times the slowest honest step: retries and crashes may double it twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """From `at_s` for `duration_s` the first `samplers` samplers cannot reach anybody."""

    at_s: float
    duration_s: float
    samplers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundChange:
    """At `at_s` the user sets another S."""

    at_s: float
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyChange:
    """At `at_s` these samplers, by number, are on standby and all others are active."""

    at_s: float
    samplers: tuple[int, ...]


Death = Literal["trainer", "node", "both"]
DEATHS: tuple[Death, ...] = ("trainer", "node", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """Before its `effect`-th effect, counted from 1, the learner loses its trainer, its node, or both."""

    effect: int
    what: Death

    def __str__(self) -> str:
        return f"{self.effect}:{self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCrash:
    """Before its `action`-th action, counted from 1 over all its lives, a sampler vanishes without a word."""

    action: int
    node: NodeId

    def __str__(self) -> str:
        return f"{self.action}:{self.node}"


def parse_crash(text: str) -> Crash | SamplerCrash:
    """ "17:node" is the learner's, "17:s0" a sampler's; ValueError if it is of neither form."""
    at, _, what = text.partition(":")
    if what.startswith("s") and what[1:].isdecimal():
        return SamplerCrash(action=int(at), node=NodeId(what))
    return Crash(effect=int(at), what=DEATHS[DEATHS.index(cast(Death, what))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run. Shares are probabilities; `mean_up_s` 0 means that no sampler ever goes. With `turns` samples
    are episodes of up to so many, whose environments think for `think_s` in the mean."""

    name: str
    max_staleness: int = 2
    adaptive: bool = True
    publish_every_steps: int = 1
    groups_per_step: int = 4
    group_size: int = 4
    steps: int = 40
    train_step_s: float = 2.0
    eval_every_steps: int = 10
    eval_prompts: int = 8
    samplers: int = 3
    join_every_s: float = 0.0
    capacity: int = 8
    generation_s: float = 1.5
    generation_sigma: float = 0.5
    speed_spread: float = 0.3
    generation_failure_share: float = 0.0
    lease_time_limit_s: float = 30.0
    reward_s: float = 0.05
    turns: int = 0
    think_s: float = 0.1
    refused_share: float = 0.0
    dynamic_sampling: bool = False
    selection: Selection = "uniform"
    broadcast_s: float = 0.6
    broadcast_spread: float = 0.3
    beat_s: float = 5.0
    call_s: float = 3.0
    latency_s: float = 0.02
    jitter_s: float = 0.01
    loss_share: float = 0.0
    link_bytes_per_s: float = 10e6
    mean_up_s: float = 0.0
    mean_down_s: float = 30.0
    polite_share: float = 0.0
    partitions: tuple[Partition, ...] = ()
    patient: bool = False
    bound_changes: tuple[BoundChange, ...] = ()
    standby_changes: tuple[StandbyChange, ...] = ()
    commit_s: float = 0.005
    checkpoint_every_steps: int = 5
    checkpoint_s: float = 1.0
    crashes: tuple[Crash | SamplerCrash, ...] = ()
    mean_learner_down_s: float = 10.0

    @property
    def stall_s(self) -> float:
        """Longest time without a learner step or an evaluation while a live sampler is connected.

        The slowest honest step: samples of a lost node come free after three beats, a version is fetched, and one
        sampler alone generates the batch in rounds that may each reach the time limit of a lease. Who could not reach
        the learner comes back within a back-off, twice over if it first has to learn of a version; what a sampler held
        that vanished while the learner was down comes free after RETURN_S besides.
        """
        work = max(self.groups_per_step * self.group_size, self.eval_prompts)
        round_s = self.slowest_generation_s + self.reward_s + 4 * self.call_s
        rounds = (math.ceil(work / self.capacity) + 1) * max(1, self.turns)
        fetch_s = self.broadcast_s * math.exp(self.broadcast_spread) + 4 * self.call_s
        step_s = MISSED_BEATS * self.beat_s + fetch_s + self.train_step_s + rounds * round_s
        return PATIENCE * step_s + RETURN_S + 2 * MAX_BACK_OFF_S

    @property
    def slowest_generation_s(self) -> float:
        """The engine cuts what exceeds the lease's time limit; four sigma of the slowest node otherwise."""
        slowest = self.generation_s * math.exp(self.speed_spread + 4 * self.generation_sigma)
        return min(self.lease_time_limit_s, slowest)

    @staticmethod
    def random(seed: int) -> Scenario:
        """The scenario that `seed` draws; everything is scaled by its step time."""
        draw = Random(seed)
        staleness = draw.randint(0, 6)
        group_size = draw.randint(1, 6)
        step_s = math.exp(draw.uniform(math.log(0.5), math.log(10)))
        generation_s = step_s * math.exp(draw.uniform(math.log(0.1), math.log(3)))
        broadcast_s = step_s * math.exp(draw.uniform(math.log(0.02), math.log(3)))
        samplers = draw.randint(1, 8)
        return Scenario(
            name=RANDOM,
            max_staleness=staleness,
            publish_every_steps=draw.randint(1, staleness + 1),
            groups_per_step=draw.randint(1, 6),
            group_size=group_size,
            steps=draw.randint(10, 30),
            train_step_s=step_s,
            eval_every_steps=draw.randint(2, 10),
            eval_prompts=draw.randint(1, 16),
            samplers=samplers,
            join_every_s=draw.choice((0.0, 0.0, 3 * step_s)),
            capacity=draw.randint(1, 2 * group_size),
            generation_s=generation_s,
            generation_sigma=draw.choice((0.0, 0.5, 1.0)),
            speed_spread=draw.choice((0.0, 1.0)),
            generation_failure_share=draw.choice((0.0, 0.0, 0.1)),
            lease_time_limit_s=8 * generation_s,
            reward_s=step_s * draw.uniform(0.0, 0.2),
            refused_share=draw.choice((0.0, 0.0, 0.05)),
            broadcast_s=broadcast_s,
            beat_s=draw.uniform(1.0, 5.0),
            call_s=draw.uniform(0.5, 3.0),
            latency_s=draw.uniform(0.001, 0.2),
            jitter_s=draw.uniform(0.0, 0.2),
            loss_share=draw.choice((0.0, 0.0, 0.01, 0.05)),
            mean_up_s=draw.choice((0.0, 30 * (generation_s + broadcast_s + step_s))),
            mean_down_s=draw.uniform(1.0, 60.0),
            polite_share=draw.choice((0.0, 0.5, 1.0)),
            partitions=tuple(
                Partition(
                    at_s=draw.uniform(0.0, 20 * step_s),
                    duration_s=draw.uniform(1.0, 60.0),
                    samplers=draw.randint(1, samplers),
                )
                for _ in range(draw.choice((0, 0, 1, 2)))
            ),
            patient=draw.choice((False, False, draw.random() < 0.5, True)),
            bound_changes=tuple(
                BoundChange(at_s=draw.uniform(0.0, 30 * step_s), max_staleness=draw.randint(0, 6))
                for _ in range(draw.choice((0, 0, 0, 1, 3)))
            ),
            commit_s=draw.choice((0.001, 0.05, 0.5)),
            checkpoint_every_steps=draw.randint(1, 6),
            checkpoint_s=step_s * draw.uniform(0.1, 2.0),
            crashes=_some_crashes(draw, draw.choice((0, 0, 0, 1, 5)), mean_apart=300),
            mean_learner_down_s=draw.uniform(1.0, 60.0),
            standby_changes=_some_standbys(draw, draw.choice((0, 0, 2, 8)), samplers, 30 * step_s),
            dynamic_sampling=draw.random() < 0.3,
            selection=draw.choice(("uniform", "uniform", "frontier")),
        )

    @staticmethod
    def unlimited_hold(seed: int) -> Scenario:
        """The scenario of I7 that `seed` draws: no faults, all that pacing has to cope with, and unlimited hold.

        S goes from 0 to 16 with the seed; any period up to S + 1, a broadcast of up to three steps, lognormal lengths
        of sigma 1, rates of 1 : 50 between devices. A sampler takes less or more than a group: several fill one.
        """
        draw = Random(seed)
        staleness = seed % 17
        group_size = draw.randint(1, 6)
        step_s = math.exp(draw.uniform(math.log(0.5), math.log(10)))
        generation_s = step_s * math.exp(draw.uniform(math.log(0.1), math.log(3)))
        return Scenario(
            name=UNLIMITED_HOLD,
            max_staleness=staleness,
            adaptive=seed % 34 < 17,
            publish_every_steps=draw.choice((1, draw.randint(1, staleness + 1), staleness + 1)),
            groups_per_step=draw.randint(1, 6),
            group_size=group_size,
            steps=2 * staleness + draw.randint(6, 12),
            train_step_s=step_s,
            eval_every_steps=draw.randint(4, 20),
            eval_prompts=draw.randint(1, 4),
            samplers=draw.randint(1, 10),
            capacity=draw.randint(1, 2 * group_size),
            generation_s=generation_s,
            generation_sigma=1.0,
            speed_spread=math.log(50) / 2,
            lease_time_limit_s=1000 * generation_s,
            reward_s=step_s * draw.uniform(0.0, 0.2),
            broadcast_s=step_s * draw.choice((draw.uniform(0.01, 3.0), 3.0)),
            broadcast_spread=0.0,
            beat_s=draw.uniform(1.0, 5.0),
            latency_s=draw.uniform(0.001, 0.2),
            jitter_s=draw.uniform(0.0, 0.2),
            patient=True,
            commit_s=draw.choice((0.001, 0.05)),
        )


def _some_crashes(draw: Random, count: int, *, mean_apart: float) -> tuple[Crash, ...]:
    """Crashes of the learner, so many effects apart in the mean."""
    at, chosen = 0, []
    for _ in range(count):
        at += 1 + int(draw.expovariate(1 / mean_apart))
        chosen.append(Crash(effect=at, what=draw.choice(DEATHS)))
    return tuple(chosen)


def _some_standbys(draw: Random, count: int, samplers: int, within_s: float) -> tuple[StandbyChange, ...]:
    """So many changes, the last of which makes everybody active."""
    if not count:
        return ()
    *times, last = sorted(draw.uniform(0.0, within_s) for _ in range(count))
    share = draw.choice((0.3, 0.8))
    some = [tuple(i for i in range(samplers) if draw.random() < share) for _ in times]
    changes = zip([*times, last], [*some, ()], strict=True)
    return tuple(StandbyChange(at_s=at_s, samplers=chosen) for at_s, chosen in changes)


def _every(step: int, last: int) -> tuple[Crash, ...]:
    """A crash every `step` effects, each of another kind."""
    return tuple(Crash(effect=at, what=DEATHS[at // step % 3]) for at in range(step, last, step))


DEFAULT = Scenario(name="default")

_PACED = replace(
    DEFAULT,
    name="paced",
    steps=60,
    max_staleness=3,
    train_step_s=10.0,
    eval_every_steps=1000,
    eval_prompts=1,
    samplers=9,
    capacity=1,
    generation_s=5.0,
    generation_sigma=0.0,
    speed_spread=0.0,
    broadcast_s=3.0,
    broadcast_spread=0.0,
    link_bytes_per_s=100e6,
)
"""Constant lengths, one slot a sampler: S 3, kappa 1, T_bcast 0.3 T_train, T_gen 0.5 T_train of design.md section 9.
R / T_train is 1.6 rollouts a second; a sampler makes 0.2 less its round trips, so that 9 samplers are 5 % too many."""

_DIAL = tuple(BoundChange(at_s=at_s, max_staleness=s) for at_s, s in ((20, 0), (40, 6), (60, 1), (80, 2), (82, 0)))

TINY = Scenario(
    name="tiny",
    max_staleness=1,
    groups_per_step=2,
    group_size=2,
    steps=4,
    eval_every_steps=2,
    eval_prompts=2,
    samplers=2,
    capacity=3,
    checkpoint_every_steps=2,
    checkpoint_s=3.0,
    commit_s=0.1,
    mean_learner_down_s=5.0,
    mean_down_s=3.0,
)
"""Small enough to be run again with a crash before every effect and every action of it."""

_STANDBYS = tuple(
    StandbyChange(at_s=at_s, samplers=samplers)
    for at_s, samplers in ((5.0, (0,)), (20.0, (0, 1)), (40.0, (0, 1, 2)), (60.0, (1, 2)), (80.0, ()))
)

TINY_EPISODES = replace(TINY, name="tiny-episodes", turns=3)
TINY_SEQUENTIAL = replace(TINY, name="tiny-sequential", max_staleness=0)

NAMED: Mapping[str, Scenario] = MappingProxyType(
    {
        scenario.name: scenario
        for scenario in (
            DEFAULT,
            TINY,
            TINY_EPISODES,
            TINY_SEQUENTIAL,
            replace(DEFAULT, name="episodes", turns=5, samplers=6, mean_up_s=20.0, mean_down_s=10.0, polite_share=0.3),
            replace(DEFAULT, name="lossy-episodes", turns=5, loss_share=0.08, call_s=1.0, crashes=_every(400, 3000)),
            replace(DEFAULT, name="sequential-one", max_staleness=0, samplers=1),
            replace(DEFAULT, name="sequential-three", max_staleness=0),
            *(
                replace(DEFAULT, name=f"period-{s + 1}", max_staleness=s, publish_every_steps=s + 1, steps=6 * (s + 1))
                for s in range(5)
            ),
            replace(DEFAULT, name="slow-broadcast", broadcast_s=6.0),
            replace(DEFAULT, name="churn", steps=60, samplers=6, mean_up_s=20.0, mean_down_s=10.0, polite_share=0.3),
            replace(DEFAULT, name="lossy", steps=60, loss_share=0.08, call_s=1.0, reward_s=2.0),
            replace(DEFAULT, name="lossy-sequential", max_staleness=0, samplers=1, loss_share=0.08, call_s=1.0),
            replace(DEFAULT, name="partition", partitions=(Partition(at_s=20.0, duration_s=40.0, samplers=2),)),
            replace(DEFAULT, name="failing-generations", generation_failure_share=0.3),
            replace(DEFAULT, name="failing-calls", generation_failure_share=0.3, loss_share=0.08, call_s=1.0),
            replace(DEFAULT, name="refused-answers", refused_share=0.4),
            replace(DEFAULT, name="dynamic-sampling", group_size=2, dynamic_sampling=True),
            replace(
                DEFAULT,
                name="dynamic-sampling-crashes",
                group_size=2,
                dynamic_sampling=True,
                patient=True,
                crashes=_every(230, 3000),
            ),
            replace(DEFAULT, name="polite", samplers=6, mean_up_s=30.0, polite_share=1.0, generation_s=4.0),
            replace(DEFAULT, name="late-joiners", join_every_s=15.0),
            replace(
                DEFAULT,
                name="crashes",
                steps=30,
                crashes=_every(230, 3000),
                commit_s=0.1,
                reward_s=1.0,
                mean_learner_down_s=40.0,
            ),
            replace(
                DEFAULT,
                name="crashes-sequential",
                steps=20,
                max_staleness=0,
                crashes=_every(140, 2000),
                reward_s=1.0,
                beat_s=1.0,
                mean_learner_down_s=40.0,
                commit_s=0.1,
            ),
            replace(DEFAULT, name="uneven", generation_sigma=1.0, speed_spread=1.0, samplers=6),
            replace(
                DEFAULT,
                name="dial",
                steps=60,
                max_staleness=4,
                publish_every_steps=3,
                samplers=6,
                bound_changes=_DIAL,
            ),
            replace(DEFAULT, name="standbys", steps=60, standby_changes=_STANDBYS),
            _PACED,
        )
    }
)
"""Scenarios that the command line and the tests know by name."""


DRAWN: Mapping[str, Callable[[int], Scenario]] = MappingProxyType(
    {RANDOM: Scenario.random, UNLIMITED_HOLD: Scenario.unlimited_hold}
)
"""Scenarios that depend on the seed."""


def scenario_named(name: str, seed: int) -> Scenario:
    """The scenario called `name`; KeyError if there is none."""
    drawn = DRAWN.get(name)
    return NAMED[name] if drawn is None else drawn(seed)
