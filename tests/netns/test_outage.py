"""A volunteer's line that is dead for two minutes, as when a router is restarted: the run goes on afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Learner, Swarm, accepted_by, eventually, fetch_status, swarm_in
from tests.netns.hosts import Hosts, hosts

pytestmark = pytest.mark.long

DEAD_S = 120.0


@pytest.fixture
def network() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def test_a_network_that_is_gone_for_two_minutes_comes_back_and_the_run_goes_on(network: Hosts, tmp_path: Path) -> None:
    one, two = network
    with swarm_in(tmp_path) as swarm:
        learner = _lead(swarm, network)
        sampler = swarm.join(learner.join_line(), "--lan", name="sampler", place=two.command([]))
        relay = swarm.relay(learner.join_line(), "--lan", "--port", "7701", name="relay", place=two.command([]))

        def step() -> int:
            with one.inside():
                return int(fetch_status(f"https://{one.address}:7700")["step"])

        def sees_relay() -> bool:
            with one.inside():
                return bool(fetch_status(f"https://{one.address}:7700")["publics"])

        eventually(lambda: step() >= 2 and sees_relay(), sampler, "the run learns")
        (engine,) = sampler.children()
        network.partition([[one], [two]])
        time.sleep(DEAD_S)
        with one.inside():
            assert not any(accepted_by(fetch_status(f"https://{one.address}:7700")).values()), "it is taken for gone"
        eventually(lambda: not sees_relay(), relay, "the relay is held dead")
        stood_at = step()
        assert sampler.says("trying again until it answers")
        network.heal()
        eventually(lambda: sampler.says("the learner answers again"), sampler, "it finds the learner again")
        eventually(lambda: step() >= stood_at + 3, sampler, "the run learns again")
        assert engine.is_running(), "nothing was wrong with the engine"
        assert not sampler.says("joining again"), "no sleep is mistaken for an outage"
        eventually(sees_relay, relay, "nobody stays dead")
        with two.inside():
            eventually(lambda: _is_up_to_date(relay.url()), relay, "the relay follows the versions again")


def _lead(swarm: Swarm, network: Hosts) -> Learner:
    host = network.host(1)
    learner = swarm.lead(
        *("--host", host.address, "--port", "7700", "--lan", "--steps", "1000000"), name="run", place=host.command([])
    )
    eventually(lambda: learner.says("a sampler joins with"), learner, "the learner listens")
    return learner


def _is_up_to_date(url: str) -> bool:
    status = fetch_status(url)
    return bool(status["map"]) and status["map"] == status["newest"]
