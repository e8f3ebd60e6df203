"""Random scenarios of membership: a swarm and what befalls it, drawn from one seed, then quiet until it is whole again.

bin/python -m tests.simulator --gossip --seed 7       one of them, and its figures
bin/python -m tests.simulator --gossip --seeds 100    the first hundred, up to the first that fails
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from swarm.gossip.records import GossipRules
from tests.simulator.gossip.checkers import GossipChecker
from tests.simulator.gossip.swarm import GossipScenario, GossipSwarm

RULES = GossipRules()

Figures = dict[str, Any]

SETTLE_ROUNDS = 2 * RULES.life_rounds
"""I6: two lives of a record after the last fault everybody knows everybody; mostly it takes half a life."""

HEAD_ROUNDS = 60
"""A head that is published in a whole swarm is everywhere within this time, at 30 % loss too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipPlan:
    """A swarm and its faults, in virtual seconds; a share of 0 is no such fault."""

    scenario: GossipScenario
    calm_s: float
    partition_s: float = 0.0
    partition_share: float = 0.0
    crash_share: float = 0.0
    restart_share: float = 0.0
    learner_moves: bool = False

    @classmethod
    def random(cls, seed: int) -> GossipPlan:
        draw = Random(f"gossip {seed}")
        scenario = GossipScenario(
            nodes=draw.randint(4, 28),
            leaf_share=draw.choice([0.0, 0.3, 0.6, 0.8]),
            latency_s=draw.choice([0.01, 0.04, 0.15]),
            jitter_s=draw.choice([0.0, 0.06, 0.2]),
            loss_share=draw.choice([0.0, 0.1, 0.3]),
            stall_s=draw.choice([0.0, 0.0, 5.0]),
            stall_every_s=draw.choice([60.0, 300.0]),
            bootstraps=draw.randint(1, 3),
            join_s=draw.choice([0.0, 10.0, 60.0]),
            skew_s=draw.choice([0.0, 36_000.0]),
        )
        return cls(
            scenario=scenario,
            calm_s=draw.uniform(20.0, 120.0),
            partition_s=draw.choice([0.0, 20.0, 60.0, 150.0]),
            partition_share=draw.uniform(0.1, 0.6),
            crash_share=draw.choice([0.0, 0.1, 0.3]),
            restart_share=draw.choice([0.0, 0.1, 0.3]),
            learner_moves=draw.random() < 0.3,
        )


def run_seed(seed: int, *, tell: Callable[[str], None] | None = None) -> Figures:
    """Run it, and return what it came to; InvariantBreach where an invariant does not hold. `settle_s` is how long the
    swarm took to be whole after the last fault."""
    plan = GossipPlan.random(seed)
    swarm = GossipSwarm(plan.scenario, seed, tell=tell)
    checker = GossipChecker(swarm, f"bin/python -m tests.simulator --gossip --seed {seed}")
    swarm.populate()
    swarm.run_for(plan.scenario.join_s + plan.calm_s)
    _faults(plan, swarm)
    settle_s = checker.run_until_settled(SETTLE_ROUNDS * RULES.round_s)
    # A stall may come at any time: what is whole stays so but for the moment.
    swarm.publish(9, incarnation=1)
    head_s = checker.run_until_settled(HEAD_ROUNDS * RULES.round_s + 2 * plan.scenario.stall_s)
    return Figures(
        nodes=len(swarm.live()),
        publics=len(swarm.publics()),
        lonely=sum(map(checker.is_lonely, swarm.live())),
        virtual_s=swarm.world.now,
        events=swarm.world.events,
        deaths=len(checker.deaths),
        false_deaths=len(checker.false_deaths()),
        settle_s=settle_s,
        head_s=head_s,
        digest=swarm.world.trace_digest(),
    )


def _faults(plan: GossipPlan, swarm: GossipSwarm) -> None:
    """Everything at once: the swarm is cut, nodes crash and come back, the learner moves, versions appear meanwhile."""
    draw = swarm.world.random
    numbers = [str(node.number) for node in swarm.nodes]
    island = draw.sample(numbers, max(1, round(plan.partition_share * len(numbers))))
    heal = swarm.network.cut(island) if plan.partition_s else None
    swarm.publish(1)
    # A bootstrap that lives is all that a newcomer has: the learner moves only where there is another.
    bootstraps = swarm.nodes[: swarm.scenario.bootstraps]
    others = [node for node in swarm.live() if node not in bootstraps]
    for node in draw.sample(others, round(plan.crash_share * len(others))):
        node.crash()
    alive = [node for node in others if node.alive]
    for node in draw.sample(alive, round(plan.restart_share * len(alive))):
        swarm.restart(node)
    if plan.learner_moves and any(node.is_public for node in bootstraps[1:]):
        swarm.restart(swarm.by_node[swarm.learner_key.node_id])
    swarm.run_for(plan.partition_s or 10.0)
    swarm.publish(2)
    if heal is not None:
        heal()
