"""Real nodes in networks of their own: TLS by default, dial-back over real addresses, a partition, a shielded host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Learner, Node, Swarm, accepted_by, eventually, fetch_status, swarm_in
from tests.netns.hosts import Host, Hosts, hosts

pytestmark = pytest.mark.long

PARTITION_S = 60.0
ENDLESS = ("--steps", "1000000", "--lan")
RELAYS_PER_HOST, SAMPLERS_PER_HOST = 2, 3


class Placed:
    """Nodes and the hosts they run in."""

    def __init__(self, swarm: Swarm, network: Hosts) -> None:
        self.swarm = swarm
        self.network = network
        self.host_of: dict[str, Host] = {}

    def lead(self, host: Host) -> Learner:
        self.host_of["run"] = host
        place = host.command([])
        return self.swarm.lead("--host", host.address, "--port", "7700", *ENDLESS, name="run", place=place)

    def relay(self, host: Host, bootstrap: str, name: str, *, port: int) -> Node:
        self.host_of[name] = host
        return self.swarm.relay(bootstrap, "--lan", "--port", str(port), name=name, place=host.command([]))

    def sampler(self, host: Host, bootstrap: str, name: str) -> Node:
        self.host_of[name] = host
        return self.swarm.scripted(bootstrap, "--lan", name=name, place=host.command([]))

    def status(self, node: Node) -> dict[str, Any]:
        with self.host_of[node.name].inside():
            return fetch_status(node.url())

    def publics(self, node: Node) -> set[str]:
        return {public["node"] for public in self.status(node)["publics"]}

    def ids(self, nodes: list[Node]) -> set[str]:
        return {self.status(node)["node"] for node in nodes}

    def contributors(self, learner: Learner) -> set[str]:
        return {node for node, accepted in accepted_by(self.status(learner)).items() if accepted}

    def sees(self, node: Node, others: list[Node]) -> bool:
        return self.publics(node) | self.ids([node]) == self.ids(others)


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[Placed]:
    with hosts(6) as network, swarm_in(tmp_path) as swarm:
        yield Placed(swarm, network)


def _line_of(learner: Learner, placed: Placed) -> str:
    eventually(lambda: learner.says("a sampler joins with"), learner, "the learner listens")
    line = learner.join_line()
    assert placed.status(learner)["encrypted"] is True
    return line


def test_a_shielded_host_takes_part_and_a_partition_heals(placed: Placed) -> None:
    """20 nodes on six hosts, of which one is shielded, and a partition of a minute. Integration's swarm on one host
    loses its bootstrap, and its learner moves."""
    one, two, three, four, five, six = placed.network
    placed.network.shield(six)
    learner = placed.lead(one)
    line = _line_of(learner, placed)
    relays = [
        placed.relay(host, line, f"relay-{host.number}-{i}", port=7700 + i)
        for host in (two, three, four)
        for i in range(RELAYS_PER_HOST)
    ]
    far = f"{two.address}:7700"
    eventually(lambda: placed.ids(relays) == placed.publics(learner), learner, "all relays are public")
    samplers = [
        placed.sampler(host, far, f"sampler-{host.number}-{i}")
        for host in (three, four, five)
        for i in range(SAMPLERS_PER_HOST)
    ]
    shielded = [placed.sampler(six, far, f"shielded-{i}") for i in range(SAMPLERS_PER_HOST)]
    dialable = [learner, *relays, *samplers]
    for node in dialable:
        eventually(lambda: placed.sees(node, dialable), node, f"{node.name} sees every public")  # noqa: B023
    everybody = placed.ids([*samplers, *shielded])
    eventually(lambda: placed.contributors(learner) == everybody, shielded[0], "every sampler contributes")
    assert {placed.status(node)["reachability"] for node in shielded} == {"leaf"}

    _cut_for_a_minute(placed, learner, dialable)
    for node in dialable:
        eventually(lambda: placed.sees(node, dialable), node, f"{node.name} sees both sides again")  # noqa: B023


def _cut_for_a_minute(placed: Placed, learner: Learner, dialable: list[Node]) -> None:
    """Hosts 1 to 3 and 4 to 6 apart, until each side holds the other dead, and for a minute at least."""
    one, two, three, four, five, six = placed.network
    near = [node for node in dialable if placed.host_of[node.name] in (one, two, three)]
    away = [node for node in dialable if node not in near]
    placed.network.partition([[one, two, three], [four, five, six]])
    until = time.monotonic() + PARTITION_S
    for side in (near, away):
        for node in side:
            eventually(lambda: placed.sees(node, side), node, f"{node.name} sees its own side alone")  # noqa: B023
    eventually(lambda: time.monotonic() > until, learner, "the minute is over")
    placed.network.heal()
