"""Learner and samplers as real processes: joining, leaving, dying, coming back."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.integration.processes import (
    Learner,
    Swarm,
    accepted_by,
    command,
    eventually,
    free_port,
)

ENDLESS = ("--steps", "1000000")


def _contributes(learner: Learner, samplers: int) -> bool:
    """At least `samplers` of them have accepted rollouts."""
    return sum(count > 0 for count in accepted_by(learner.status()).values()) >= samplers


@pytest.mark.slow
def test_samplers_join_late_leave_politely_and_outlive_their_learner(swarm: Swarm) -> None:
    """One life in sequential mode: a second sampler joins, the first leaves, the learner dies, another takes over."""
    port = str(free_port())
    first = swarm.scripted(f"127.0.0.1:{port}", name="first")
    eventually(lambda: first.says("trying again"), first, "a bootstrap that does not answer is said so")

    learner = swarm.lead("--port", port, "--max-staleness", "0", *ENDLESS)
    eventually(lambda: _contributes(learner, 1), first, "the first sampler is found and contributes")

    late = swarm.scripted(f"127.0.0.1:{port}", name="late")
    eventually(lambda: _contributes(learner, 2), late, "the late sampler catches up and contributes")

    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    assert [event["kind"] for event in learner.events()].count("sampler_left") == 1
    eventually(lambda: len(learner.status()["samplers"]) == 1, learner, "a status, made once a second, says so")
    step = learner.status()["step"]
    eventually(lambda: learner.status()["step"] > step + 2, learner, "training goes on without the first sampler")
    assert learner.status()["max_staleness_seen"] == 0

    children = learner.children()
    learner.signal(signal.SIGKILL)
    learner.wait()
    assert len(children) >= 2  # the trainer and the reward process
    assert psutil.wait_procs(children, timeout=60)[1] == []
    eventually(lambda: late.says("cannot be reached"), late, "the loss of the learner is said so")

    second = swarm.lead("--port", port, "--max-staleness", "0", *ENDLESS, name="second")
    eventually(lambda: _contributes(second, 1), late, "the sampler joins the learner that took the address")
    assert late.says("another swarm")


@pytest.mark.slow
def test_a_run_ends_and_says_goodbye(swarm: Swarm) -> None:
    learner = swarm.lead("--port", "0", "--steps", "6", "--publish-every-steps", "3", "--tensorboard")
    sampler = swarm.join(learner.url(), name="sampler")
    assert learner.wait() == 0, learner.output()
    assert sampler.wait() == 0, sampler.output()
    assert sampler.says("the run is finished")
    summary = learner.summary()
    assert summary["step"] == 6
    assert summary["versions_published"] == 3
    assert [entry["version"] for entry in summary["held_out"]] == [0, 6]
    # Engine and learner agree wherever rollouts are of the learner's own version, as all of the first batch are.
    distances = [step["mismatch_kl"] for step in learner.metrics() if "mismatch_kl" in step]
    assert 0 <= max(distances) < 1e-3
    assert not list((learner.run_dir / "checkpoints").glob("*.partial"))
    _is_exported(learner.run_dir, _is_verified(learner))
    _is_reported(learner.run_dir)
    lanes = json.loads((learner.run_dir / "timeline.json").read_text())["lanes"]
    assert {"train", "wait", "stage"} <= lanes.pop("learner")["ms"].keys()
    assert {"encode", "send"} == lanes.pop("publication")["ms"].keys()
    (lane,) = lanes.values()
    assert {"fetch", "install", "draw", "wait", "gone"} <= lane["ms"].keys()


def _is_reported(run_dir: Path) -> None:
    """Its figures are in a report and in TensorBoard's file, its model is one that others load."""
    done = command("report", str(run_dir))
    assert (done.returncode, done.stdout) == (0, f"report in {run_dir / 'report.html'}\n")
    assert '"state":"finished"' in (run_dir / "report.html").read_text()
    (events,) = (run_dir / "tensorboard").iterdir()
    assert b"train/reward" in events.read_bytes()
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (start,) = [line for line in lines if line["kind"] == "prepared"]
    assert (start["step"], start["device"], "--tensorboard" in start["command"]) == (0, "cpu", True)
    model = run_dir.parent / "model"
    done = command("export", "model", str(run_dir), "--to", str(model))
    assert (done.returncode, done.stdout) == (0, f"the model of step 6 in {model}\n")


def _is_verified(learner: Learner) -> int:
    """Of 6 steps of 4 groups of 4. Return how many rollouts were accepted."""
    report = learner.verified()
    assert (report["batches"], report["trained"]) == (6, 6 * 4 * 4)
    assert report["accepted"] == report["trained"] + report["dropped"] + report["waiting"]
    assert report["checkpoints"][-1] == 6
    return int(report["accepted"])


def _is_exported(run_dir: Path, accepted: int) -> None:
    """`export rollouts` writes what `verify` counts."""
    to = run_dir.parent / "rollouts.jsonl"
    done = command("export", "rollouts", str(run_dir), "--to", str(to))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{accepted} rollouts in {to}\n"
    rows = [json.loads(line) for line in to.read_text().splitlines()]
    assert len(rows) == accepted
    trained = [row for row in rows if row["step"] is not None]
    assert Counter(row["step"] for row in trained) == dict.fromkeys(range(6), 4 * 4)
