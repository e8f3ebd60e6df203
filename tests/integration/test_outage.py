"""A learner out of reach or mute, an engine that stands still: nothing is lost, and nobody is stuck."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.sampler.spool import Spool
from tests.integration.gate import gate_to
from tests.integration.processes import Swarm, accepted_by, eventually, fetch_status, free_port, swarm_in

pytestmark = pytest.mark.slow

ENDLESS = ("--steps", "1000000")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(tmp_path) as processes:
        yield processes


def _spooled(state: Path) -> int:
    """Rollouts in the spool of a node."""
    (directory,) = (state / "spool").iterdir()
    spool = Spool(directory.parent, directory.name, lambda line: pytest.fail(line))
    return sum(len(spool.read(path)) for path in spool.files())


def test_what_a_killed_sampler_generated_is_accepted_when_it_comes_back(swarm: Swarm, tmp_path: Path) -> None:
    """It dies between generating and submitting, the learner being out of reach."""
    port = free_port()
    with gate_to(port) as gate:
        learner = swarm.lead(
            "--port", str(port), "--advertise", gate.address, "--no-tls", "--max-staleness", "8", *ENDLESS
        )
        sampler = swarm.scripted(gate.address, "--no-tls", name="sampler")

        learner.node_json()

        def accepted() -> int:
            return sum(accepted_by(fetch_status(f"http://127.0.0.1:{port}")).values())

        eventually(accepted, sampler, "the sampler contributes")
        gate.shut_at(b"POST /v1/steps")
        eventually(gate.is_shut.is_set, sampler, "it submits")
        sampler.kill()
        spooled = _spooled(tmp_path / "state-sampler")
        assert spooled > 0

        gate.open()
        again = swarm.scripted(gate.address, "--no-tls", name="sampler")
        line = f"rollouts from before were submitted: {spooled} accepted\n"
        eventually(lambda: again.says(line), again, "what was spooled is accepted")
        before = accepted()
        eventually(lambda: accepted() > before, again, "it goes on")


@pytest.mark.long
def test_a_learner_that_never_answers_does_not_hold_a_leaver(swarm: Swarm) -> None:
    learner = swarm.lead("--port", "0", *ENDLESS)
    sampler = swarm.scripted(learner.url(), name="sampler")
    eventually(lambda: any(accepted_by(learner.status()).values()), sampler, "the sampler contributes")
    learner.signal(signal.SIGSTOP)
    try:
        sampler.signal(signal.SIGTERM)
        assert sampler.wait() == 0
        assert sampler.says("the learner could not be told")
    finally:
        learner.signal(signal.SIGCONT)


@pytest.mark.long
def test_an_engine_that_stands_still_is_replaced(swarm: Swarm) -> None:
    learner = swarm.lead("--port", "0", *ENDLESS)
    sampler = swarm.scripted(learner.url(), name="sampler", place=("env", "ENGINE_HANG_S=10"))
    eventually(lambda: any(accepted_by(learner.status()).values()), sampler, "the sampler contributes")
    (engine,) = sampler.children()
    engine.suspend()
    line = "the engine made no progress for 10 s and was killed; starting again (1 of 5 faults in a row)"
    eventually(lambda: sampler.says(line), sampler, "the node says that its engine hung")
    before = sum(accepted_by(learner.status()).values())
    eventually(lambda: sum(accepted_by(learner.status()).values()) > before, sampler, "it contributes again")
    assert not engine.is_running()
