"""The broadcast benchmark measures and cleans up, by the scheme that is not ours."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.netns.hosts import swarms

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(
        importlib.util.find_spec("libtorrent") is None, reason="needs libtorrent: pip install '.[bench]'"
    ),
]

COMMAND = [sys.executable, "-m", "benchmarks.broadcast", "--schemes", "libtorrent", "--size-mib", "4", "--json"]

PROFILE = """
[[host]]
up_mbit = 40
down_mbit = 80
[[host]]
up_mbit = 40
down_mbit = 80
[[host]]
up_mbit = 20
down_mbit = 80
reachable = false
[[host]]
up_mbit = 20
down_mbit = 80
reachable = false
"""


def test_a_transfer_is_measured(tmp_path: Path) -> None:
    """Two of three peers cannot be dialled, so that all ways to connect are used."""
    profile = tmp_path / "profile.toml"
    profile.write_text(PROFILE)
    done = subprocess.run([*COMMAND, "--profile", str(profile)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    found = said["schemes"]["libtorrent"]
    assert found["bound_s"] == pytest.approx(4 * 8.388608 / 40, abs=0.001)
    assert 1.0 < found["ratio"] < 8.0
    assert 0 < found["first_peer_s"] <= found["last_peer_s"]
    # A leaf cannot get a piece from another: the learner or the public sends each of them.
    assert 1.0 < found["learner_copies"] < 3.5
    assert 0 < found["cpu_s_per_gb"] < 500
    assert said["hosts"][2] == {"up_mbit": 20, "down_mbit": 80, "reachable": False}


def test_a_fault_ends_the_wait_for_its_victim() -> None:
    faults = ["--kill", "2@0.3", "--stall", "3@0.3"]
    done = subprocess.run([*COMMAND, "--peers", "3", *faults], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["schemes"]["libtorrent"]
    assert len(found["faults_s"]) == 2
    assert max(found["faults_s"]) < found["last_peer_s"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_when_it_is_interrupted(number: signal.Signals) -> None:
    with subprocess.Popen([*COMMAND, "--size-mib", "64", "--peers", "2"], stdout=subprocess.DEVNULL) as process:

        def own() -> list[str]:
            return [name for name in swarms() if name.startswith(f"pid-{process.pid}-")]

        # The first swarm is the one that finds out whether this machine can do it.
        while not any(name.endswith("-2") for name in own()):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(2.0)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert own() == []
