"""Weights over real networks: an upload cap is kept on the wire, and hosts that nobody can dial take part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Node, Publisher, Swarm, eventually, fetch_status, swarm_in
from tests.netns.hosts import Host, Hosts, hosts

pytestmark = pytest.mark.netns

SIZE = 16 << 20
LEARNER_MBIT = 20.0
CAP_MBIT = 8.0
WINDOW_S = 5.0
SAMPLE_S = 0.2


@pytest.fixture
def network() -> Iterator[Hosts]:
    with hosts(4) as made:
        yield made


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(tmp_path) as processes:
        yield processes


def sent_bytes(host: Host) -> int:
    """All bytes that left the host, as its interface counted them."""
    with host.inside():
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def status_of(node: Node, host: Host) -> dict[str, Any]:
    with host.inside():
        return fetch_status(node.url())


def highest_mbit(samples: list[tuple[float, int]]) -> float:
    """The highest rate over a window."""
    rates = [
        (later[1] - earlier[1]) * 8e-6 / (later[0] - earlier[0])
        for number, earlier in enumerate(samples)
        for later in samples[number:]
        if WINDOW_S <= later[0] - earlier[0] < WINDOW_S + 3 * SAMPLE_S
    ]
    return max(rates)


def test_an_upload_cap_is_kept_on_the_wire_and_leaves_receive_and_send(
    swarm: Swarm, network: Hosts, tmp_path: Path
) -> None:
    """The relays' caps bind: the learner and they share the work for about ten seconds."""
    one, *others = network
    network.shape(one, up_mbit=LEARNER_MBIT)
    network.shield(others[2])
    learner = Publisher(tmp_path, "publisher", 7700, size=SIZE, host=one.address, place=one.command([]))
    swarm.nodes.append(learner)
    line = str(learner.event("listening")["join"])
    capped = ("--lan", "--max-upload", str(CAP_MBIT), "--port", "7701")
    relays = [
        swarm.relay(line, *capped, name=f"relay-{number}", place=host.command([])) for number, host in enumerate(others)
    ]
    for number, (relay, host) in enumerate(zip(relays, others, strict=True)):
        eventually(lambda: status_of(relay, host).get("streams") == 3, relay, "everybody is linked")  # noqa: B023
        reachability = "leaf" if number == 2 else "public"
        eventually(lambda: status_of(relay, host)["reachability"] == reachability, relay, "it knows its place")  # noqa: B023
    before = [sent_bytes(host) for host in others]
    learner.publish()
    samples: list[list[tuple[float, int]]] = [[] for _ in others]
    until = time.monotonic() + 60.0
    complete = False
    while not complete:
        assert time.monotonic() < until, learner.output()
        for found, host in zip(samples, others, strict=True):
            found.append((time.monotonic(), sent_bytes(host)))
        complete = all(status_of(r, h).get("map") == "0.0" for r, h in zip(relays, others, strict=True))
        time.sleep(SAMPLE_S)
    assert [highest_mbit(found) <= 1.05 * CAP_MBIT for found in samples] == [True] * 3, samples
    # Each relays about a quarter of the version to two others; the leaf's chunks go to both publics.
    sent = [sent_bytes(host) - was for host, was in zip(others, before, strict=True)]
    assert min(sent) > SIZE / 8, sent
    assert highest_mbit(samples[0]) > 0.5 * CAP_MBIT
