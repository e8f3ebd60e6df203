"""Weights between real processes on loopback: relays carry them, and nobody's death stops them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.processes import Node, Publisher, Swarm, eventually, eventually_each, free_port, is_complete

ENDLESS = ("--steps", "1000000", "--lan")
SIZE = 48 << 20
SLOW_LINE = ("--max-download", "100")
"""Mbit/s: a version takes four seconds, so that what is killed once some of it has come is killed in the middle."""


@pytest.fixture
def publisher(swarm: Swarm, tmp_path: Path) -> Publisher:
    node = Publisher(tmp_path, "publisher-0", free_port(), size=SIZE)
    swarm.nodes.append(node)
    return node


def held(node: Node, version: str = "0.0") -> float:
    """How much of a version the node holds, as a share."""
    status = node.status()
    syncing = status["syncing"] or {}
    return float(status.get("map") == version or (syncing["share"] if syncing.get("version") == version else 0))


@pytest.mark.slow
def test_a_relay_carries_weights_to_samplers(swarm: Swarm) -> None:
    learner = swarm.lead("--port", "0", *ENDLESS)
    relay = swarm.relay(learner.url(), "--lan", name="relay")
    samplers = [swarm.scripted(learner.url(), "--lan", name=f"sampler-{number}") for number in range(2)]
    eventually_each((relay, *samplers), lambda node: node.status().get("streams") == 3, "everybody is linked")
    sent = relay.status()["stream_bytes_sent"]
    eventually(lambda: learner.status()["version"], learner, "it publishes")
    version = str(learner.status()["version"])
    eventually_each((relay, *samplers), lambda node: newer(node.status().get("map"), version), "it gets newer versions")
    for node in samplers:
        eventually(lambda: newer(node.status()["installed"], version), node, "its engine takes them")  # noqa: B023
        eventually(lambda: went_all_the_way(node), node, "a version goes all the way, and its stages are told")  # noqa: B023
    published = learner.status()["broadcasts"].values()
    assert any(one["stage_s"] > 0 and one["prepared_s"] > 0 for one in published)
    eventually(lambda: relay.status()["stream_bytes_sent"] > sent + 100_000, relay, "the relay passes chunks on")
    assert relay.status()["chunks_rejected"] == {}
    relay.signal(signal.SIGTERM)
    assert relay.wait() == 0


@pytest.mark.long
def test_a_sampler_that_joins_while_the_learner_is_away_gets_the_newest_version_from_a_relay(swarm: Swarm) -> None:
    learner = swarm.lead("--port", "0", *ENDLESS)
    relay = swarm.relay(learner.url(), "--lan", name="relay")
    early = swarm.scripted(learner.url(), "--lan", name="early")
    eventually(lambda: newer(relay.status().get("map"), "0.1"), relay, "it holds a version that was trained")
    # Without a sampler the learner comes to rest. A version that was on its way would have parts that nobody gives.
    early.kill()
    eventually(lambda: at_rest(learner, relay), learner, "it waits for rollouts, and the relay has its version")
    learner.kill()
    late = swarm.scripted(relay.url(), "--lan", name="late")
    held = relay.status()["map"]
    eventually(lambda: late.status().get("map") == held, late, "it holds what the relay holds")
    assert relay.status()["map"] == held


def at_rest(learner: Node, relay: Node) -> bool:
    status = learner.status()
    newest = f"0.{status['step']}"
    return status["groups_ready"] < 4 and [status["version"], relay.status().get("map")] == [newest, newest]


def went_all_the_way(node: Node) -> bool:
    """True if a version has reached every stage, one after the other."""
    told = [list(times.values()) for times in node.status()["versions"].values()]
    return any(None not in times and times == sorted(times) for times in told)


def newer(found: str | None, than: str) -> bool:
    return found is not None and [*map(int, found.split("."))] > [*map(int, than.split("."))]


@pytest.mark.long
def test_what_a_poisoned_relay_passes_on_is_refused_and_had_from_others(swarm: Swarm, publisher: Publisher) -> None:
    given = ("--role", "relay", "--lan")
    liar = swarm.join(publisher.url(), *given, name="liar", module="tests.integration.poisoned_relay")
    relays = [swarm.relay(publisher.url(), "--lan", name=f"relay-{number}") for number in range(2)]
    eventually_each((liar, *relays), lambda node: node.status().get("streams") == 3, "everybody is linked")
    publisher.publish()
    eventually_each(relays, lambda relay: is_complete(relay, "0.0"), "the honest get all of it")
    whole = swarm.published()
    # What lies on the disk is a copy of the map in memory, written after it.
    eventually_each(relays, lambda relay: swarm.weights(relay.name) == whole, "its copy of the map is that")
    assert all(relay.status()["chunks_rejected"]["digest"] >= 3 for relay in relays)
    assert all(relay.says("sent wrong chunks again and again") for relay in relays)


@pytest.mark.slow
def test_a_relay_and_then_a_learner_killed_in_the_middle_hold_up_nobody_and_go_on(
    swarm: Swarm, publisher: Publisher
) -> None:
    relays = swarm.linked_relays(publisher, 3, *SLOW_LINE)
    publisher.publish()
    first, victim, third = relays
    eventually(lambda: held(victim) > 0.2, victim, "it holds some of the version")
    victim.kill()
    assert not any(is_complete(relay, "0.0") for relay in (first, third))
    eventually_each((first, third), lambda relay: is_complete(relay, "0.0"), "the others get all of it")
    again = swarm.relay(publisher.url(), "--lan", *SLOW_LINE, name=victim.name)
    relays = [first, again, third]
    eventually(lambda: is_complete(again, "0.0"), again, "it gets the rest after its restart")
    whole = swarm.published()
    # All chunks are here before the last of them is in the map.
    eventually_each(relays, lambda relay: swarm.weights(relay.name) == whole, "its map holds them")

    publisher.publish()
    eventually(lambda: held(first, "0.1") > 0.1, first, "it holds some of the next version")
    publisher.kill()
    assert not any(is_complete(relay, "0.1") for relay in relays)
    port = int(publisher.url().rpartition(":")[2])
    next_life = Publisher(swarm.directory, "publisher-1", port, size=SIZE)
    swarm.nodes.append(next_life)
    eventually_each(relays, lambda relay: is_complete(relay, "0.1"), "it gets the rest")
    next_life.publish()
    eventually_each(relays, lambda relay: is_complete(relay, "1.0"), "versions of the next life are newer")


@pytest.mark.long
def test_relays_outlive_a_learner_that_begins_another_model(swarm: Swarm, publisher: Publisher) -> None:
    (relay,) = swarm.linked_relays(publisher, 1)
    publisher.publish()
    eventually(lambda: is_complete(relay, "0.0"), relay, "it gets the first model")
    publisher.kill()
    port = int(publisher.url().rpartition(":")[2])
    again = Publisher(swarm.directory, "publisher-1", port, size=SIZE // 2)
    swarm.nodes.append(again)
    again.publish()
    eventually(lambda: is_complete(relay, "1.0"), relay, "it gets the second model")
    assert relay.says("joining it again")
    assert relay.process.poll() is None
