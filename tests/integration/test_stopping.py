"""A learner that is asked to stop, and one that begins with the model of another, as real processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from swarm.learner.checkpoint.files import checkpoint_path, is_whole
from tests.integration.processes import Node, Swarm, command, eventually, swarm_in

ENDLESS = ("--steps", "1000000", "--port", "0")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(tmp_path) as processes:
        yield processes


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_a_stopped_learner_keeps_what_it_says_and_another_run_begins_with_its_model(swarm: Swarm) -> None:
    learner = swarm.lead("--learning-rate", "1e-3", *ENDLESS)
    sampler = swarm.scripted(learner.url(), name="sampler")
    eventually(lambda: learner.status()["step"] >= 3, learner, "three steps")
    page = json.loads((learner.run_dir / "dashboard.json").read_text())
    assert f"page {page['url']}/?token={page['token']}" in learner.output().splitlines()
    rollouts = fetched(f"{page['url']}/api/rollouts?count=2")
    assert [len(group["rollouts"]) for group in rollouts["groups"]] == [4, 4]
    assert rollouts["groups"][0]["prompt"].endswith("=")
    assert {"learner", "publication"} < {one["lane"] for one in fetched(f"{page['url']}/api/timeline")["all"]}
    assert command("dashboard", str(learner.run_dir)).stdout == f"page {page['url']}/?token={page['token']}\n"
    sampler.signal(signal.SIGINT)
    assert sampler.wait() == 0
    assert "leaving; " in sampler.output()
    assert "left the swarm; " in sampler.output().splitlines()[-1]
    learner.signal(signal.SIGINT)
    assert learner.wait() == 130
    said = learner.output().splitlines()
    step = json.loads((learner.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert f"stopping; waiting for the checkpoint of step {step} (again to stop at once)" in said
    go_on = f"go on with:  echo-node lead --resume {learner.run_dir}"
    assert (
        said[-1] == f"stopped at step {step} of 1000000; {learner.run_dir} keeps the checkpoint of step {step}; {go_on}"
    )
    assert is_whole(checkpoint_path(learner.run_dir / "checkpoints", step))

    before = (learner.run_dir / "config.json").read_bytes()
    fork = swarm.lead("--from", str(learner.run_dir), "--learning-rate", "2e-4", "--steps", "1", name="fork")
    swarm.scripted(fork.url(), name="other")
    assert fork.wait() == 0, fork.output()
    assert f"a new run with the model of {learner.run_dir} after {step} steps, and a fresh optimiser" in fork.output()
    config = json.loads((fork.run_dir / "config.json").read_text())
    assert config["from"] == {"run": str(learner.run_dir), "step": step, "best": False, "model": "tiny"}
    assert (config["learning_rate"], config["groups_per_step"]) == (2e-4, 4)
    assert (learner.run_dir / "config.json").read_bytes() == before
    assert fork.output().splitlines()[-1] == f"finished at step 1; run directory {fork.run_dir}"
    verified = command("verify", str(fork.run_dir))
    assert verified.returncode == 0, verified.stderr

    resumed = swarm.resume(learner, name="resumed")
    eventually(lambda: resumed.status()["state"] == "running", resumed, "it runs")
    assert resumed.status()["step"] == step
    assert json.loads((learner.run_dir / "dashboard.json").read_text()) == page
    assert "training again" not in resumed.output()


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
        with suppress(OSError):  # ENXIO: nobody reads it yet.
            held.append(os.open(scenario, os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    try:
        eventually(is_read, plan, "the scenario is opened")
        plan.signal(signal.SIGINT)
        assert plan.wait() == 130
    finally:
        plan.end()
        for descriptor in held:
            os.close(descriptor)
    assert plan.output() == "echo-node: stopped\n"
