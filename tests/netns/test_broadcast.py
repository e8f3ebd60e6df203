"""Weights over real networks: an upload cap is kept on the wire, and hosts that nobody can dial take part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Node, Publisher, Swarm, eventually, fetch_status, swarm_in
from tests.netns.hosts import Host, Hosts, hosts

SIZE = 16 << 20
LEARNER_MBIT = 20.0
CAP_MBIT = 8.0
WINDOW_S = 5.0
SAMPLE_S = 0.2

PATIENCE_S = 60.0
"""Six times as long as the caps ask for."""


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


@dataclass(frozen=True, slots=True)
class Reading:
    """A counter, and two moments between which it was read."""

    before_s: float
    sent_bytes: int
    after_s: float


def read_sent(host: Host) -> Reading:
    before_s = time.monotonic()
    return Reading(before_s, sent_bytes(host), time.monotonic())


def highest_mbit(readings: list[Reading]) -> float:
    """The highest rate over a window or more: never above the true one, however slow the machine reads. What was over
    before one window was has none."""
    rates = [
        (later.sent_bytes - earlier.sent_bytes) * 8e-6 / (later.after_s - earlier.before_s)
        for number, earlier in enumerate(readings)
        for later in readings[number:]
        if later.after_s - earlier.before_s >= WINDOW_S
    ]
    assert rates, readings
    return max(rates)


def watch(watched: list[Host], relays: list[tuple[Node, Host]]) -> list[list[Reading]]:
    """What each of the hosts has sent, again and again until all relays hold the version."""
    readings: list[list[Reading]] = [[] for _ in watched]
    until = time.monotonic() + PATIENCE_S
    complete = False
    while not complete:
        assert time.monotonic() < until, [status_of(*relay) for relay in relays]
        for found, host in zip(readings, watched, strict=True):
            found.append(read_sent(host))
        complete = all(status_of(*relay).get("map") == "0.0" for relay in relays)
        time.sleep(SAMPLE_S)
    return readings


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
    readings = watch(others, list(zip(relays, others, strict=True)))
    assert [highest_mbit(found) <= 1.05 * CAP_MBIT for found in readings] == [True] * 3, readings
    # Each relays about a quarter of the version to two others; the leaf's chunks go to both publics.
    sent = [sent_bytes(host) - was for host, was in zip(others, before, strict=True)]
    assert min(sent) > SIZE / 8, sent
    assert highest_mbit(readings[0]) > 0.5 * CAP_MBIT
