"""A run directory on a disk that fills up: the run waits, nothing is broken, and it goes on when there is room."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.learner.checkpoint.files import is_whole, whole_checkpoints
from tests.integration.processes import Learner, Swarm, command, eventually, swarm_in

DISK_MB = 200
"""Room for a run of the tiny model beside the 64 MiB that the broadcast and checkpoints leave free."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"no small disk can be made here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        # Lazily: whatever a failed test left open must not keep it.
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def swarm(disk: Path) -> Iterator[Swarm]:
    # After `disk`: the processes end before it is taken away.
    with swarm_in(disk.parent) as processes:
        yield processes


def _fill(ballast: Path) -> None:
    """Write until the disk takes nothing more."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            return


def _is_paused(learner: Learner) -> bool:
    status = learner.status()
    return status["state"] == "paused" and "has no room for" in status["fault"]


@pytest.mark.long
def test_a_full_disk_pauses_the_run_and_breaks_nothing(swarm: Swarm, disk: Path) -> None:
    learner = swarm.lead("--port", "0", "--steps", "1000000", "--checkpoint-every-steps", "5", name="disk/run")
    sampler = swarm.scripted(learner.url(), name="sampler")
    eventually(lambda: learner.status()["step"] > 6, learner, "a checkpoint and more steps")
    ballast = disk / "ballast"
    _fill(ballast)
    eventually(lambda: _is_paused(learner), learner, "the learner pauses")
    fault = learner.status()["fault"]
    assert f"the disk of {learner.run_dir}" in fault
    assert "free " in fault
    eventually(lambda: learner.says(f"paused: the disk of {learner.run_dir}"), learner, "the learner says so")
    refused = command("set", str(learner.run_dir), "max-staleness=0")
    assert refused.returncode == 2
    assert "has no room for" in refused.stderr
    learner.verified()
    step = learner.status()["step"]

    os.unlink(ballast)
    eventually(lambda: learner.status()["state"] == "running", learner, "the learner goes on by itself")
    eventually(lambda: learner.status()["step"] > step + 6, learner, "more steps")
    eventually(lambda: learner.says("there is room again: going on"), learner, "the learner says so")
    assert {"paused", "unpaused"} <= {event["kind"] for event in learner.events()}
    assert sampler.process.poll() is None

    # Full again, and killed while it is: what was recorded is whole.
    _fill(ballast)
    eventually(lambda: _is_paused(learner), learner, "the learner pauses again")
    learner.kill()
    os.unlink(ballast)
    steps = _steps(learner) + 5
    again = swarm.resume(learner, "--steps", str(steps), name="again")
    assert again.wait() == 0, again.output()
    assert sampler.wait() == 0
    again.verified()
    assert len(again.metrics()) == steps
    newest = whole_checkpoints(again.run_dir / "checkpoints")[-1]
    assert newest.step == steps
    assert is_whole(newest.path)


def _steps(learner: Learner) -> int:
    """Learner steps that are recorded."""
    connection = sqlite3.connect(learner.run_dir / "journal.db")
    try:
        return int(connection.execute("SELECT count(*) FROM batches").fetchone()[0])
    finally:
        connection.close()
