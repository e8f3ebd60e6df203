"""A forest between real processes on loopback: who sends what is what the plan says."""

from __future__ import annotations

import pytest

from tests.integration.processes import Node, Publisher, Swarm, eventually, eventually_each, free_port, is_complete

pytestmark = pytest.mark.slow

RELAYS = 5
SIZE = 16 << 20

TOLERANCE = 0.5
"""Copies that a node may send more or less: on a busy machine others, the learner too, help with the last chunks, a
third of a copy with five processes to two cores. A star's learner would send five, a chain's last relay none."""

CAPPED = ("--max-upload", "40")
"""Such relays take seconds for SIZE: there is time to kill one."""


class Forest:
    """A learner that plans a forest, and relays, all public."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.learner = Publisher(swarm.directory, "publisher", free_port(), "--scheme", "forest", size=SIZE)
        swarm.nodes.append(self.learner)
        self.relays = swarm.linked_relays(self.learner, RELAYS, *CAPPED)
        eventually(lambda: len(self.learner.status()["publics"]) == RELAYS, self.learner, "it knows all publics")
        self.version = ""
        self._sent_before: dict[str, int] = {}

    def publish(self, version: str) -> None:
        self.version = version
        self._sent_before = {relay.name: self._sent_by(relay) for relay in self.relays}
        self.learner.publish()

    def wait_until_held_by(self, *relays: Node) -> None:
        """Bit for bit."""
        eventually_each(relays, lambda relay: is_complete(relay, self.version), "it holds the version")
        whole = self.swarm.published()
        assert len(whole) == SIZE
        # What lies on the disk is a copy of the map in memory, written after it.
        eventually_each(relays, lambda relay: self.swarm.weights(relay.name) == whole, "its copy of the map is that")

    def copies_of_learner(self) -> float:
        """How often it sent the version's chunks."""
        spread = self.learner.status()["broadcasts"][self.version]
        return float(spread["sent_bytes"] / spread["encoded_bytes"])

    def copies_of(self, relay: Node) -> float:
        """How often it sent the version, notes and all."""
        return (self._sent_by(relay) - self._sent_before[relay.name]) / SIZE

    @staticmethod
    def _sent_by(relay: Node) -> int:
        return int(relay.status()["stream_bytes_sent"])


def test_each_node_sends_its_part_of_a_forest_and_no_death_holds_up_who_is_below(swarm: Swarm) -> None:
    """Of a forest's 80 slots, 16 stripes to 5 relays, the learner has one a stripe and every relay a fifth of the
    rest. A mesh would share like that too, but counts repairs, which trees have none of."""
    forest = Forest(swarm)
    forest.publish("0.0")
    forest.wait_until_held_by(*forest.relays)
    status = forest.learner.status()
    assert (status["topology"], status["broadcasts"]["0.0"]["repairs"]) == ("forest", None)
    assert forest.copies_of_learner() == pytest.approx(1, abs=TOLERANCE)
    assert [forest.copies_of(relay) for relay in forest.relays] == pytest.approx([0.8] * RELAYS, abs=TOLERANCE)

    forest.publish("0.1")
    victim, *others = forest.relays
    eventually(lambda: forest.copies_of(victim) > 0.2, victim, "it has passed some of the version on")
    victim.kill()
    assert not any(is_complete(relay, forest.version) for relay in others)
    forest.wait_until_held_by(*others)
    # The rest comes from another relay, not from the learner's uplink.
    assert forest.copies_of_learner() < 2
