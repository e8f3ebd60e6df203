"""Sampled delays of gossip against the real membership cores, packet by packet, on a small swarm."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from swarm.gossip.records import Appeared, Died, Effect
from swarm.plan.simulate.swarm import death_s, newcomer_s
from tests.simulator.gossip.swarm import GossipNode, GossipScenario, GossipSwarm

EVENTS = 20
PATIENCE_S = 60.0


class Learner:
    """What the learner of a swarm of 20 hears, and how long after it happened."""

    def __init__(self) -> None:
        self.swarm = GossipSwarm(GossipScenario(nodes=20, leaf_share=0.5, loss_share=0.05, join_s=5.0), 1)
        self.swarm.populate()
        self.swarm.run_for(95.0)
        self._node = self.swarm.by_node[self.swarm.learner_key.node_id]
        self._since = 0.0
        self.delays: list[float] = []
        self._kind: type[Effect] = Appeared
        self.swarm.on_change = self._changed

    def newcomers(self) -> list[float]:
        for _ in range(EVENTS):
            self._await(Appeared)
            self.swarm.add_new(public=True).start()
            self.swarm.run_for(PATIENCE_S)
        return self.delays

    def deaths(self) -> list[float]:
        others = [node for node in self.swarm.publics() if node is not self._node]
        for node in others[:EVENTS]:
            self._await(Died)
            node.crash()
            self.swarm.run_for(PATIENCE_S)
        return self.delays

    def _await(self, kind: type[Effect]) -> None:
        self._kind, self._since = kind, self.swarm.world.now

    def _changed(self, node: GossipNode, effect: Effect) -> None:
        if node is self._node and isinstance(effect, self._kind):
            self.delays.append(self.swarm.world.now - self._since)


@pytest.mark.long
def test_newcomers_are_known_as_late_as_packet_by_packet() -> None:
    real = Learner().newcomers()
    random = Random(1)
    sampled = [newcomer_s(random) for _ in range(10_000)]  # Fewer may miss the end of the range that is drawn from
    assert len(real) == EVENTS
    assert median(sampled) == pytest.approx(median(real), abs=0.5)
    assert min(sampled) <= min(real) + 0.2
    assert max(sampled) >= max(real) - 0.2


def test_deaths_are_known_as_late_as_packet_by_packet() -> None:
    real = Learner().deaths()
    random = Random(1)
    sampled = [death_s(random) for _ in range(1000)]
    assert len(real) >= 8
    assert median(sampled) == pytest.approx(median(real), abs=1.5)
    assert min(sampled) == pytest.approx(min(real), abs=1.0)
    assert max(sampled) == pytest.approx(max(real), abs=1.0)
