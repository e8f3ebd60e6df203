"""A sampler that is killed between generating and submitting: nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from swarm.sampler.spool import Spool
from tests.integration import dying_sampler
from tests.integration.processes import Swarm, accepted_by, eventually

pytestmark = pytest.mark.slow


def _spooled(state: Path) -> int:
    """Rollouts in the spool of a node."""
    (directory,) = (state / "spool").iterdir()
    spool = Spool(directory.parent, directory.name, lambda line: pytest.fail(line))
    return sum(len(spool.read(path)) for path in spool.files())


def test_what_a_killed_sampler_generated_is_accepted_when_it_comes_back(swarm: Swarm, tmp_path: Path) -> None:
    learner = swarm.lead("--port", "0", "--max-staleness", "8", "--steps", "1000000")
    sampler = swarm.scripted(learner.url(), name="sampler", module=dying_sampler.__name__)
    assert sampler.wait() == -signal.SIGKILL, sampler.output()
    spooled = _spooled(tmp_path / "state-sampler")
    assert spooled > 0
    again = swarm.scripted(learner.url(), name="sampler")
    line = f"rollouts from before were submitted: {spooled} accepted\n"
    eventually(lambda: again.says(line), again, "what was spooled is accepted")
    eventually(lambda: sum(accepted_by(learner.status()).values()) > spooled, again, "it goes on")
