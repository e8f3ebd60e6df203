"""A whole swarm in one process: the learner with the real rollout plane, samplers that join, crash, leave and return.

Theory of operation. `Cluster.run` starts everything, lets the world run until the learner has finished, and has the
checkers look after every event. An assertion or a lookup that fails inside a core is a breach like any other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from random import Random

from benchmarks.holding import HoldingPlane
from swarm.plan.simulate.world import World
from swarm.rollout.plane.episodes import EpisodeRules
from swarm.rollout.plane.plane import PlaneRules
from swarm.types import NodeId, SamplingRules
from tests.simulator.network import LinkShape, Network
from tests.simulator.rollouts.checkers import WatchedPlane
from tests.simulator.rollouts.disk import Disk
from tests.simulator.rollouts.learner import Figures, Learner
from tests.simulator.rollouts.ledger import Ledger
from tests.simulator.rollouts.lineage import Lineage
from tests.simulator.rollouts.sampler import Sampler, SamplerDisk
from tests.simulator.rollouts.scenario import BoundChange, Partition, SamplerCrash, Scenario, StandbyChange
from tests.simulator.rollouts.task import MAX_NEW_TOKENS, STOP_TOKEN, VOCABULARY, prompt


class Cluster:
    """One run of `scenario` under `seed`. `tell` gets the lines of the trace."""

    def __init__(self, scenario: Scenario, seed: int, *, tell: Callable[[str], None] | None = None) -> None:
        self.world = World(Random(seed), tell=tell)
        self._scenario = scenario
        self._network = Network(
            self.world,
            LinkShape(
                latency_s=scenario.latency_s,
                jitter_s=scenario.jitter_s,
                loss_share=scenario.loss_share,
                bytes_per_s=scenario.link_bytes_per_s,
            ),
        )
        self._plane = WatchedPlane(scenario, seed=seed, clock=lambda: self.world.now)
        self._ledger = Ledger(scenario.group_size, self._plane.breach)
        self._lineage = Lineage(self._ledger, self._plane.breach)
        self._disk = Disk(self.world, self._ledger, commit_s=scenario.commit_s)
        plane_of = partial(new_plane, scenario, seed)
        self._learner = Learner(self.world, scenario, self._plane, self._disk, self._lineage, plane_of)
        self._samplers: list[Sampler] = []
        self._disks: defaultdict[NodeId, SamplerDisk] = defaultdict(SamplerDisk)
        for crash in scenario.crashes:
            if isinstance(crash, SamplerCrash):
                self._disks[crash.node].crash_before.add(crash.action)

    def run(self) -> Figures:
        """Run to the end. Raises InvariantBreach."""
        self.world.watch = self._check
        try:
            self._start()
            self.world.run_until(lambda: self._learner.finished)
        except (AssertionError, LookupError) as error:
            self._plane.breach("core", f"{type(error).__name__} {error}", cause=error)
        if not self._learner.finished:
            self._plane.breach("liveness", "nothing is left to happen")
        self._disk.flush()
        self._plane.settle(self._ledger)
        self._lineage.settle()
        return self._learner.figures

    @property
    def points(self) -> int:
        """Effects of the learner so far: `Scenario.crash_at` names some of them."""
        return self._learner.points

    def actions(self, node: NodeId) -> int:
        """Actions of a sampler so far: a SamplerCrash names one of them."""
        return self._disks[node].actions

    def _start(self) -> None:
        self._learner.start()
        for i in range(self._scenario.samplers):
            self.world.schedule(i * self._scenario.join_every_s, f"s{i} joins", self._first_life(i))
        for partition in self._scenario.partitions:
            self.world.schedule(partition.at_s, "partition", self._cut(partition))
        for change in self._scenario.bound_changes:
            self.world.schedule(change.at_s, f"S is set to {change.max_staleness}", self._set_bound(change))
        for standby in self._scenario.standby_changes:
            self.world.schedule(standby.at_s, f"{len(standby.samplers)} on standby", self._set_standby(standby))

    def _set_bound(self, change: BoundChange) -> Callable[[], None]:
        return lambda: self._learner.set_bound(change.max_staleness)

    def _set_standby(self, change: StandbyChange) -> Callable[[], None]:
        return lambda: self._learner.set_standby([NodeId(f"s{number}") for number in change.samplers])

    def _check(self) -> None:
        held = [(sampler.node, sampler.held) for sampler in self._samplers if sampler.alive]
        self._plane.check(held, connected=self._learner.working and not self._network.partitioned)

    def _cut(self, partition: Partition) -> Callable[[], None]:
        def cut() -> None:
            heal = self._network.cut(f"s{i}" for i in range(partition.samplers))
            self.world.schedule(partition.duration_s, "partition heals", heal)

        return cut

    # -- lives of samplers -----------------------------------------------------------------------------------

    def _first_life(self, number: int) -> Callable[[], None]:
        slowness, broadcast_s = self._spread(self._scenario.speed_spread), self._scenario.broadcast_s
        broadcast_s *= self._spread(self._scenario.broadcast_spread)
        return lambda: self._live(NodeId(f"s{number}"), slowness, broadcast_s)

    def _spread(self, spread: float) -> float:
        return math.exp(self.world.random.uniform(-spread, spread))

    def _live(self, node: NodeId, slowness: float, broadcast_s: float) -> None:
        """One life; the next one begins a while after its end."""

        def gone() -> None:
            self._samplers.remove(sampler)
            down_s = self.world.random.expovariate(1 / self._scenario.mean_down_s)
            self.world.schedule(down_s, f"{node} returns", lambda: self._live(node, slowness, broadcast_s))

        sampler = Sampler(
            world=self.world,
            network=self._network,
            scenario=self._scenario,
            learner=self._learner,
            node=node,
            slowness=slowness,
            broadcast_s=broadcast_s,
            disk=self._disks[node],
            on_gone=gone,
        )
        self._samplers.append(sampler)
        sampler.start()
        if self._scenario.mean_up_s:
            up_s = self.world.random.expovariate(1 / self._scenario.mean_up_s)
            polite = self.world.random.random() < self._scenario.polite_share
            end = sampler.leave if polite else sampler.crash
            self.world.schedule(up_s, f"{node} {'leaves' if polite else 'crashes'}", end)


def new_plane(scenario: Scenario, seed: int, life: int, max_staleness: int) -> HoldingPlane:
    rules = PlaneRules(
        run_seed=seed,
        life=life,
        max_staleness=max_staleness,
        adaptive=scenario.adaptive,
        groups_per_step=scenario.groups_per_step,
        group_size=scenario.group_size,
        dynamic_sampling=scenario.dynamic_sampling,
        selection=scenario.selection,
        rules=SamplingRules(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(STOP_TOKEN,)),
        vocab_size=VOCABULARY,
        beat_s=scenario.beat_s,
        lease_time_limit_s=scenario.lease_time_limit_s,
        episodes=EpisodeRules(max_turns=scenario.turns + 1, max_tokens=1000) if scenario.turns else None,
    )
    return HoldingPlane(rules, prompts=prompt, patient=scenario.patient)
