"""Learners and commands that are asked to stop, as real processes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.processes import Node, Swarm, eventually

ENDLESS = ("--steps", "1000000", "--port", "0")


@pytest.mark.slow
def test_a_learner_in_the_middle_of_a_step_says_so_and_ends_at_once_if_it_is_asked_again(swarm: Swarm) -> None:
    learner = swarm.lead("--max-staleness", "0", *ENDLESS, module="tests.slow_steps 3600 0")
    swarm.scripted(learner.url(), name="sampler")

    def is_training() -> bool:
        """At S = 0 nothing is drawn ahead of the batch that is trained on."""
        status = learner.status()
        accepted = bool(status["cost"]["rollouts_accepted"] >= status["batch_rollouts"])
        return accepted and bool(status["groups_ready"] == status["groups_open"] == 0)

    eventually(is_training, learner, "the first batch is taken")
    learner.signal(signal.SIGINT)
    eventually(lambda: learner.says("stopping; waiting for the end of step 1"), learner, "it says what it waits for")
    eventually(lambda: learner.status()["state"] == "stopping", learner, "its status says so, within a second")
    learner.signal(signal.SIGINT)
    assert learner.wait() == 130
    last = learner.output().splitlines()[-1]
    assert last.startswith("stopped at step 0 of 1000000; ")
    assert last.endswith(f"go on with:  echo-node lead --resume {learner.run_dir}")


def test_a_learner_on_a_terminal_has_a_view_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    # However quick the machine, the learner stays in its start: its trainer imports this until the gate closes.
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    (tmp_path / "held" / "torch").mkdir(parents=True)
    held = f"open({str(tmp_path / 'gate')!r}).read()\nraise SystemExit\n"
    (tmp_path / "held" / "torch" / "__init__.py").write_text(held)
    leader, follower = pty.openpty()
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm", "lead", "--host", "127.0.0.1", "--run-dir", str(run_dir), *ENDLESS],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "held")},
        start_new_session=True,
    )
    os.close(follower)
    seen = ""
    try:
        while "waiting for torch to be imported and the model to be loaded" not in seen:
            seen += os.read(leader, 65536).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # The end of the process is an error of its terminal.
            while True:
                seen += os.read(leader, 65536).decode(errors="replace")
        process.wait()
    finally:
        process.kill()
        process.wait()
        os.close(leader)
        os.close(gate)
    assert process.returncode == 130
    assert "echo-node lead · starting" in seen
    # Whatever hides a cursor or takes another screen begins so.
    assert "\x1b[?" not in seen
    last = seen.rpartition("\x1b[J")[2]
    assert last.startswith(f"stopped while it was starting; {run_dir} keeps what it held; go on with: ")


def test_a_command_that_is_stopped_says_so_in_a_line(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    os.mkfifo(scenario)
    plan = Node(tmp_path, "plan", "plan", str(scenario))

    held: list[int] = []

    def is_read() -> bool:
        """A signal between open and read would be seen only after the read: it has to wait there already."""
        if not held:
            with suppress(OSError):  # ENXIO: nobody reads it yet.
                held.append(os.open(scenario, os.O_WRONLY | os.O_NONBLOCK))
        return bool(held) and psutil.Process(plan.process.pid).status() == psutil.STATUS_SLEEPING

    try:
        eventually(is_read, plan, "the scenario is opened")
        plan.signal(signal.SIGINT)
        assert plan.wait() == 130
    finally:
        plan.end()
        for descriptor in held:
            os.close(descriptor)
    assert plan.output() == "echo-node: stopped\n"
