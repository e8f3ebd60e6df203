"""The benchmarks over namespaces measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long


def said_by(module: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_transfer_with_faults_is_measured(tmp_path: Path) -> None:
    """Two of three peers cannot be dialled, so that all ways to connect are used; one dies, one stands still."""
    profile, leaf = tmp_path / "profile.toml", "[[host]]\nup_mbit = 20\ndown_mbit = 80\nreachable = false\n"
    profile.write_text("[[host]]\nup_mbit = 40\ndown_mbit = 80\n" * 2 + leaf * 2)
    faults = ("--kill", "2@0.3", "--stall", "3@0.3", "--size-mib", "32")
    said = said_by("broadcast", "--profile", str(profile), *faults)
    found = said["schemes"]["relay"]
    assert found["encrypted"] is True
    assert found["bound_s"] == pytest.approx(32 * 8.388608 / 40, abs=0.001)
    assert found["ratio"] > 1.0
    assert found["cpu_s_per_gb"] > 0
    assert said["hosts"][2] == {"up_mbit": 20, "down_mbit": 80, "reachable": False}
    assert len(found["faults_s"]) == 2
    assert max(found["faults_s"]) < found["last_peer_s"]


def test_a_version_is_followed_to_the_first_token_that_is_drawn_with_it() -> None:
    found = said_by("version", "--size-mib", "16", "--receivers", "1", "--deltas", "1")
    for kind in ("full", "delta"):
        assert found[kind].keys() >= {"trainer_held_s", "encode_s", "disk_bytes_per_received_byte", "cpu_s_per_gb"}
        assert found[kind]["installed_over_wire"] > 1
        assert found[kind]["stages"]["drawn_s"]["last"] > found[kind]["installed_s"]
