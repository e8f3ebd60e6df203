"""Forest, chain, tree and star between real processes on loopback: who sends what is what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Node, Publisher, Swarm, eventually, free_port, is_complete, swarm_in

pytestmark = pytest.mark.slow

RELAYS = 5
SIZE = 8 << 20
VERSION = "0.0"

TOLERANCE = 0.2
"""Copies that a node may send besides: on a busy machine the last chunks are pulled, and may come twice."""

LARGE_SIZE = 16 << 20
CAPPED = ("--max-upload", "40")
"""A chain of such relays takes over three seconds for LARGE_SIZE: there is time to kill one."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(tmp_path) as processes:
        yield processes


class Trees:
    """A learner that is told its scheme, and relays, all public, in the order in which a plan places them: of equal
    uplinks, since nobody's is known before the first version, the smaller id comes first."""

    def __init__(self, swarm: Swarm, scheme: str, *, size: int = SIZE, arguments: tuple[str, ...] = ()) -> None:
        self.swarm = swarm
        self.learner = Publisher(swarm.directory, "publisher", free_port(), "--scheme", scheme, size=size)
        swarm.nodes.append(self.learner)
        relays = swarm.linked_relays(self.learner, RELAYS, *arguments)
        eventually(lambda: len(self.learner.status()["publics"]) == RELAYS, self.learner, "it knows all publics")
        self.relays = sorted(relays, key=lambda relay: str(relay.status()["node"]))
        self._sent_before = {relay.name: self._sent_by(relay) for relay in relays}
        self._size = size

    def wait_until_held_by(self, *relays: Node) -> None:
        """Bit for bit."""
        for relay in relays:
            eventually(lambda: is_complete(relay, VERSION), relay, "it holds the version")  # noqa: B023
        whole = self.swarm.published()
        assert len(whole) == self._size
        for relay in relays:
            # What lies on the disk is a copy of the map in memory, written after it.
            eventually(lambda: self.swarm.weights(relay.name) == whole, relay, "its copy of the map is that")  # noqa: B023

    def copies_of_learner(self) -> float:
        """How often it sent the version's chunks."""
        spread = self.learner.status()["broadcasts"][VERSION]
        return float(spread["sent_bytes"] / spread["encoded_bytes"])

    def copies_of(self, relay: Node) -> float:
        """How often it sent the version, notes and all."""
        return (self._sent_by(relay) - self._sent_before[relay.name]) / self._size

    @staticmethod
    def _sent_by(relay: Node) -> int:
        return int(relay.status()["stream_bytes_sent"])


@pytest.mark.parametrize(
    ("scheme", "by_learner", "by_relays"),
    [
        pytest.param("star", 5, [0, 0, 0, 0, 0], marks=pytest.mark.long),
        pytest.param("chain", 1, [1, 1, 1, 1, 0], marks=pytest.mark.long),
        pytest.param("tree", 2, [2, 1, 0, 0, 0], marks=pytest.mark.long),
        ("forest", 1, [0.8, 0.8, 0.8, 0.8, 0.8]),
    ],
)
def test_each_node_sends_what_is_its_part_in_the_scheme(
    swarm: Swarm, scheme: str, by_learner: float, by_relays: list[float]
) -> None:
    """Of a forest's 80 slots, 16 stripes to 5 relays, the learner has one a stripe and every relay a fifth of the
    rest. A mesh would share like that too, but counts repairs, which trees have none of."""
    trees = Trees(swarm, scheme, arguments=CAPPED)
    trees.learner.publish()
    trees.wait_until_held_by(*trees.relays)
    status = trees.learner.status()
    assert (status["topology"], status["broadcasts"][VERSION]["repairs"]) == (scheme, None)
    assert trees.copies_of_learner() == pytest.approx(by_learner, abs=TOLERANCE)
    assert [trees.copies_of(relay) for relay in trees.relays] == pytest.approx(by_relays, abs=TOLERANCE)


@pytest.mark.parametrize("scheme", [pytest.param("chain", marks=pytest.mark.long), "forest"])
def test_a_relay_that_is_killed_in_the_middle_holds_up_nobody_below_it(swarm: Swarm, scheme: str) -> None:
    trees = Trees(swarm, scheme, size=LARGE_SIZE, arguments=CAPPED)
    trees.learner.publish()
    victim = trees.relays[1]
    eventually(lambda: trees.copies_of(victim) > 0.2, victim, "it has passed some of the version on")
    victim.kill()
    assert not any(is_complete(relay, VERSION) for relay in trees.relays[2:])
    trees.wait_until_held_by(*(relay for relay in trees.relays if relay is not victim))
    # The rest comes from another relay, not from the learner's uplink.
    assert trees.copies_of_learner() < 2
