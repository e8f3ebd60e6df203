"""The broadcast benchmark measures and cleans up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.netns.hosts import swarms

pytestmark = pytest.mark.long

COMMAND = [sys.executable, "-m", "benchmarks.broadcast", "--size-mib", "4", "--json"]

PEERS = 4
STARTED_S = 60.0
"""Until all processes of a scheme run, on two busy cores."""

FIGURES = {
    *("last_peer_s", "bound_s", "ratio", "first_peer_s", "cpu_s_per_gb"),
    *("learner_sent_bytes", "learner_copies", "version_bytes", "encrypted", "topology"),
}


def said_by(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_transfer_is_measured(tmp_path: Path) -> None:
    """Two of three peers cannot be dialled, so that all ways to connect are used."""
    profile, leaf = tmp_path / "profile.toml", "[[host]]\nup_mbit = 20\ndown_mbit = 80\nreachable = false\n"
    profile.write_text("[[host]]\nup_mbit = 40\ndown_mbit = 80\n" * 2 + leaf * 2)
    said = said_by("--profile", str(profile))
    found = said["schemes"]["relay"]
    assert found.keys() == FIGURES
    assert found["encrypted"] is True
    assert found["bound_s"] == pytest.approx(4 * 8.388608 / 40, abs=0.001)
    assert 1.0 < found["ratio"] < 8.0
    # A leaf cannot get a chunk from another: the learner or the public sends each of them.
    assert 1.0 < found["learner_copies"] < 3.5
    assert 0 < found["cpu_s_per_gb"] < 500
    assert said["hosts"][2] == {"up_mbit": 20, "down_mbit": 80, "reachable": False}


def test_a_fault_ends_the_wait_for_its_victim() -> None:
    found = said_by("--peers", "3", "--kill", "2@0.3", "--stall", "3@0.3", "--size-mib", "32")["schemes"]["relay"]
    assert len(found["faults_s"]) == 2
    assert max(found["faults_s"]) < found["last_peer_s"]
    assert min(found["victims_sent_copies"]) > 0


def test_a_version_is_followed_to_the_first_token_that_is_drawn_with_it() -> None:
    arguments = ["--size-mib", "16", "--receivers", "1", "--deltas", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.version", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for kind in ("full", "delta"):
        assert found[kind].keys() >= {"trainer_held_s", "encode_s", "disk_bytes_per_received_byte", "cpu_s_per_gb"}
        assert found[kind]["installed_over_wire"] > 1
        assert found[kind]["stages"]["drawn_s"]["last"] > found[kind]["installed_s"]


def swarms_of(process: subprocess.Popen[str]) -> list[str]:
    return [name for name in swarms() if name.startswith(f"pid-{process.pid}-")]


def nodes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Learner and peers that it runs."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            command = child.cmdline()
        except psutil.Error:
            continue  # one of the short-lived ones
        if "benchmarks.broadcast_learner" in command or "swarm" in command:
            found.append(child)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_when_it_is_interrupted(number: signal.Signals) -> None:
    command = [*COMMAND, "--size-mib", "64", "--peers", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True) as process:
        until = time.monotonic() + STARTED_S
        while len(nodes := nodes_of(process)) < 3:
            assert process.poll() is None
            assert time.monotonic() < until, "its nodes never ran"
            time.sleep(0.05)
        assert swarms_of(process) != []
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert swarms_of(process) == []
        assert [node for node in nodes if node.is_running() and node.status() != psutil.STATUS_ZOMBIE] == []
