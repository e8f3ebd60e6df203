"""The attackers as real processes: one sampler and one client that attack, and nobody who is left behind."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.integration.processes import run_command


@pytest.mark.long
def test_attackers_are_caught_and_every_process_ends() -> None:
    done = run_command(
        "--only", "invented-log-probs,floods", "--steps", "8", "--json", timeout_s=560, module="tests.redteam"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    invented, floods = told["attacks"]
    assert told["false_alarms"] == 0
    assert (invented["name"], invented["targeted"], invented["caught"]) == ("invented-log-probs", True, True)
    assert invented["detector"] in ("log-probs", "claims")
    assert (invented["audited"] or 0) <= 16
    assert (floods["caught"], floods["detector"], floods["held_out"]) == (True, "status 429", None)
    assert len(told["control"]["held_out"]) == 1
    assert "seed 0, invented-log-probs: held-out" in done.stderr
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if "tests.redteam.sampler" in (one.info["cmdline"] or ())
    ]
