"""A learner out of reach or mute, an engine that stands still: nothing is lost, and nobody is stuck."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.sampler.spool import Spool
from tests.integration.gate import gate_to
from tests.integration.processes import Swarm, accepted_by, eventually, fetch_status, free_port

pytestmark = pytest.mark.slow

ENDLESS = ("--steps", "1000000")


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
