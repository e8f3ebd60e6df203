"""Learner and samplers as real processes: joining, leaving, dying, coming back."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.processes import (
    Learner,
    Node,
    Swarm,
    accepted_by,
    command,
    eventually,
    free_port,
    swarm_in,
)

ENDLESS = ("--steps", "1000000")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(tmp_path) as processes:
        yield processes


def _contributes(learner: Learner, samplers: int) -> bool:
    """At least `samplers` of them have accepted rollouts."""
    return sum(count > 0 for count in accepted_by(learner.status()).values()) >= samplers


def _child(node: Node, module: str) -> psutil.Process:
    """The process of `node` that runs `module`."""
    return next(child for child in node.children() if any(module in word for word in child.cmdline()))


@pytest.mark.slow
def test_samplers_join_late_leave_politely_and_outlive_their_learner(swarm: Swarm) -> None:
    """One life in sequential mode: a second sampler joins, the first leaves, the learner dies, another takes over."""
    port = str(free_port())
    first = swarm.join(f"127.0.0.1:{port}", name="first")
    eventually(lambda: first.says("trying again"), first, "a bootstrap that does not answer is said so")

    learner = swarm.lead("--port", port, "--max-staleness", "0", *ENDLESS)
    eventually(lambda: _contributes(learner, 1), first, "the first sampler is found and contributes")

    late = swarm.join(f"127.0.0.1:{port}", name="late")
    eventually(lambda: _contributes(learner, 2), late, "the late sampler catches up and contributes")

    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    assert [event["kind"] for event in learner.events()].count("sampler_left") == 1
    eventually(lambda: len(learner.status()["samplers"]) == 1, learner, "a status, made once a second, says so")
    step = learner.status()["step"]
    eventually(lambda: learner.status()["step"] > step + 2, learner, "training goes on without the first sampler")
    assert learner.status()["max_staleness_seen"] == 0
    # At S = 0 every rollout is of the learner's own version: engine and learner must agree in every step that trained
    # on anything (a batch without variance does not). The last line may still be on its way.
    lines = (learner.run_dir / "metrics.jsonl").read_text().splitlines()[:-1]
    steps = [json.loads(line) for line in lines]
    assert all(("mismatch_kl" in step) == (step["frac_reward_zero_std"] < 1) for step in steps)
    distances = [step["mismatch_kl"] for step in steps if "mismatch_kl" in step]
    assert distances
    assert max(distances) < 1e-3

    children = learner.children()
    learner.signal(signal.SIGKILL)
    learner.wait()
    assert len(children) >= 2  # the trainer and the reward process
    assert psutil.wait_procs(children, timeout=60)[1] == []
    eventually(lambda: late.says("cannot be reached"), late, "the loss of the learner is said so")

    second = swarm.lead("--port", port, "--max-staleness", "0", *ENDLESS, name="second")
    eventually(lambda: _contributes(second, 1), late, "the sampler joins the learner that took the address")
    assert late.says("another swarm")


@pytest.mark.long
def test_a_killed_engine_and_a_killed_trainer_are_replaced(swarm: Swarm) -> None:
    """One life, in which all say what they do; the trainer makes the same weights again."""
    learner = swarm.lead("--port", "0", "--checkpoint-every-steps", "4", *ENDLESS)
    sampler = swarm.join(learner.url(), name="sampler")
    eventually(lambda: _contributes(learner, 1), sampler, "the sampler contributes")
    _says_what_it_does(learner, sampler)

    _child(sampler, "swarm.sampler.engine_child").kill()
    eventually(lambda: sampler.says("starting again"), sampler, "the node says that its engine died")
    before = sum(accepted_by(learner.status()).values())
    eventually(lambda: sum(accepted_by(learner.status()).values()) > before, sampler, "it contributes again")
    assert sampler.process.poll() is None

    eventually(lambda: learner.status()["step"] > 5, sampler, "a checkpoint and more steps")
    _child(learner, "swarm.learner.trainer").kill()
    eventually(lambda: learner.says("starting it again from the last checkpoint"), learner, "the node says so")
    step = learner.status()["step"]
    eventually(lambda: learner.status()["step"] > step + 2, sampler, "training goes on")
    assert "training again on the recorded batches" in learner.output()
    # Another incarnation would say that what was published could not be made again.
    assert learner.status()["version"].startswith("0.")
    kinds = {event["kind"] for event in learner.events()}
    assert "trainer_restarted" in kinds
    assert "diverged" not in kinds


@pytest.mark.slow
def test_a_run_ends_and_says_goodbye(swarm: Swarm) -> None:
    learner = swarm.lead("--port", "0", "--steps", "6", "--publish-every-steps", "3", "--tensorboard")
    sampler = swarm.join(learner.url(), name="sampler")
    assert learner.wait() == 0, learner.output()
    assert sampler.wait() == 0, sampler.output()
    assert sampler.says("the run is finished")
    summary = json.loads((learner.run_dir / "summary.json").read_text())
    assert summary["step"] == 6
    assert summary["versions_published"] == 3
    assert [entry["version"] for entry in summary["held_out"]] == [0, 6]
    assert not list((learner.run_dir / "checkpoints").glob("*.partial"))
    _is_exported(learner.run_dir, _verified(learner.run_dir))
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
    page = (run_dir / "report.html").read_text()
    assert '"state":"finished"' in page
    assert page.count('"completion":') >= 3
    (events,) = (run_dir / "tensorboard").iterdir()
    assert b"train/reward" in events.read_bytes()
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (start,) = [line for line in lines if line["kind"] == "prepared"]
    assert (start["step"], start["device"]) == (0, "cpu")
    assert "--tensorboard" in start["command"]
    model = run_dir.parent / "model"
    done = command("export", "model", str(run_dir), "--to", str(model))
    assert (done.returncode, done.stdout) == (0, f"the model of step 6 in {model}\n")
    assert {"config.json", "generation_config.json", "tokenizer.json"} < {path.name for path in model.iterdir()}


def _verified(run_dir: Path) -> dict[str, Any]:
    """The last line of `verify --json`, of a run of 6 steps of 4 groups of 4."""
    done = command("verify", str(run_dir), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no breach of I1 or I3" in done.stdout
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (report["batches"], report["trained"], report["breaches"]) == (6, 6 * 4 * 4, [])
    assert report["accepted"] == report["trained"] + report["dropped"] + report["waiting"]
    assert report["checkpoints"][-1] == 6
    return report


def _is_exported(run_dir: Path, report: dict[str, Any]) -> None:
    """`export rollouts` writes what `verify` counts."""
    to = run_dir.parent / "rollouts.jsonl"
    done = command("export", "rollouts", str(run_dir), "--to", str(to))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{report['accepted']} rollouts in {to}\n"
    rows = [json.loads(line) for line in to.read_text().splitlines()]
    assert len(rows) == report["accepted"]
    trained = [row for row in rows if row["step"] is not None]
    assert Counter(row["step"] for row in trained) == dict.fromkeys(range(6), 4 * 4)
    assert all(row["prompt"] and row["reward"] is not None for row in trained)
    # A model that has learned next to nothing may answer with nothing at times.
    assert any(row["completion"] for row in trained)
    assert all(len(row["token_ids"]) == len(row["logprobs"]) > 0 for row in trained)


def test_of_what_is_no_run_nothing_is_verified_or_exported(tmp_path: Path) -> None:
    to = tmp_path / "rollouts.jsonl"
    run, target = str(tmp_path), ("--to", str(to))
    named = (("verify", run, "--json"), ("export", "rollouts", run, *target), ("export", "model", run, *target))
    for arguments in (*named, ("report", run, *target)):
        done = command(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert "is not a run directory" in done.stderr
    assert not to.exists()


@pytest.mark.long
def test_a_target_that_is_not_reached_is_exit_status_1(swarm: Swarm) -> None:
    learner = swarm.lead("--port", "0", "--steps", "2", "--target", "0.9")
    sampler = swarm.join(learner.url(), name="sampler")
    assert learner.wait() == 1, learner.output()
    assert sampler.wait() == 0, sampler.output()


def _says_what_it_does(learner: Learner, sampler: Node) -> None:
    table = command("status", learner.url())
    assert table.returncode == 0
    assert table.stdout.startswith("learner ")
    assert all(node[:12] in table.stdout for node in accepted_by(learner.status()))
    done = command("status", sampler.url(), "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["role"] == "sampler"
    assert found["node"] in accepted_by(learner.status())
    assert found["installed"]
    assert found["verdicts"]["accepted"] > 0
