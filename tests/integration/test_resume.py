"""A learner that dies, is stopped or is told to change, as real processes: nothing is lost, and the run goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import stat
import time
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from swarm.learner.checkpoint.files import checkpoint_path, is_whole, whole_checkpoints
from swarm.rollout.plane.frontier import CANDIDATES
from tests.integration import killed_commit, telling_sampler
from tests.integration.processes import Learner, Node, Swarm, command, eventually, run_command

ENDLESS = ("--steps", "1000000")
OFTEN = ("--checkpoint-every-steps", "5")
KILLS = 7
SEED = 5
"""Of the moments at which learners are killed; with it a red run is drawn again, though never quite the same."""


# -- what a run has come to ----------------------------------------------------------------------------------


def _is_running(learner: Learner) -> bool:
    return bool(learner.status()["state"] == "running")


def _has_taken(learner: Learner, steps: int) -> bool:
    return bool(learner.status()["step"] >= steps)


def _takes(learner: Learner, steps: int) -> None:
    """Wait until it has taken so many more steps."""
    eventually(lambda: _is_running(learner), learner, "the learner runs")
    wanted = learner.status()["step"] + steps
    eventually(lambda: _has_taken(learner, wanted), learner, f"{steps} more steps")


def _steps_written(learner: Learner) -> list[int]:
    return [line["step"] for line in learner.metrics()]


def _kinds(learner: Learner) -> set[str]:
    return {event["kind"] for event in learner.events()}


def _rows(learner: Learner, sql: str) -> list[Any]:
    """Rows of the journal."""
    connection = sqlite3.connect(f"file:{learner.run_dir / 'journal.db'}?mode=ro", uri=True)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def _refused(*arguments: str) -> str:
    """The one line in which a command is refused."""
    done = command(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def _says_goodbye(sampler: Node) -> None:
    assert sampler.wait() == 0, sampler.output()
    assert sampler.says("the run is finished; thank you")


def _all_that_was_told_is_on_record(learner: Learner, sampler: Node) -> None:
    """Whatever the sampler heard is accepted has a row; held-out rollouts (e*) have none."""
    told = (learner.run_dir.parent / f"state-{sampler.name}" / telling_sampler.TOLD).read_text().split()
    trained = {rollout_id for rollout_id in told if rollout_id.startswith("t")}
    assert len(trained) == sum(rollout_id.startswith("t") for rollout_id in told), "accepted twice"
    assert len(trained) > 100
    recorded = {f"t{number}/{index}" for number, index in _rows(learner, "SELECT number, idx FROM rollouts")}
    assert trained - recorded == set()


def _is_one_run(learner: Learner, steps: int) -> None:
    """Of `steps` steps, each taken once, whose versions are of one incarnation."""
    assert _steps_written(learner) == list(range(1, steps + 1))
    versions = _rows(learner, "SELECT version, incarnation FROM versions ORDER BY version")
    # A kill between a step and its publication leaves a number out; none is used twice.
    numbers = [version for version, _ in versions]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (0, steps)
    assert len({incarnation for _, incarnation in versions}) == 1, versions
    assert "diverged" not in _kinds(learner)
    assert learner.verified()["batches"] == steps
    found = whole_checkpoints(learner.run_dir / "checkpoints")
    assert found[-1].step == steps
    assert all(is_whole(checkpoint.path) for checkpoint in found)
    assert not list((learner.run_dir / "checkpoints").glob("*.partial"))


# -- what is kept for the audit ------------------------------------------------------------------------------


@pytest.mark.long
def test_rollouts_of_all_versions_within_the_bound_are_audited_after_a_restart_too(swarm: Swarm) -> None:
    """With S = 8 a batch after the restart holds rollouts of versions before it, whose weights nobody else keeps."""
    swarm.lead_with(audit_share=1.0, freshness="off")
    learner = swarm.lead("--port", "0", "--max-staleness", "8", *ENDLESS, *OFTEN)
    swarm.join(learner.url(), "--lan", "--engine", "transformers", name="sampler")
    _takes(learner, 12)
    learner.kill()
    newest = _steps_written(learner)[-1]
    kept = {int(path.stem.partition(".")[2]) for path in (learner.run_dir / "audited").glob("*.bin")}
    assert set(range(newest - 7, newest)) <= kept
    again = swarm.resume(learner, name="again")
    _takes(again, 12)
    again.kill()
    rows = [row for row in again.metrics() if row["step"] > newest]
    assert rows[0]["staleness/max"] > 1, "its first batch has nothing of the life before"
    # The first of these batches may have been taken before the kill, and was then looked at in that life.
    # Its row then has no figures of the audit.
    assert all(row.get("audit/rollouts", 0) >= 16 * number for number, row in enumerate(rows)), rows
    assert _kinds(again) & {"caught"} == set()


# -- killed at random ----------------------------------------------------------------------------------------


def _wait_a_moment(random: Random, learner: Learner) -> None:
    """Until a random moment of a learner's life: of its start, its training again or its training."""
    if random.random() < 0.5:
        # The moment is what is being tested; nothing could be waited for.
        time.sleep(random.uniform(0.0, 4.0))
    else:
        learner.node_json()
        eventually(lambda: _is_running(learner), learner, "the learner runs")
        time.sleep(random.uniform(0.0, 1.0))


@pytest.mark.long
def test_a_learner_killed_again_and_again_leads_its_run_to_the_end(swarm: Swarm) -> None:
    """At first between the arrival of rollouts and their commit, then KILLS times at random, then twice more."""
    random = Random(SEED)
    learner = swarm.lead("--port", "0", *OFTEN, *ENDLESS, module=killed_commit.__name__)
    telling = telling_sampler.__name__
    samplers = [swarm.scripted(learner.url(), name=f"sampler-{number}", module=telling) for number in range(2)]
    assert learner.wait() == -signal.SIGKILL
    learner = swarm.resume(learner, name="life-0")
    eventually(lambda: _has_taken(learner, 1), learner, "the first step")
    for kill in range(1, KILLS + 1):
        _wait_a_moment(random, learner)
        learner.kill()
        learner = swarm.resume(learner, name=f"life-{kill}")
    _takes(learner, 3)
    learner.kill()

    steps = _rows(learner, "SELECT count(*) FROM batches")[0][0] + 8
    learner = swarm.resume(learner, "--steps", str(steps), name="ending")
    ended = {"kind": "checkpoint", "step": steps}
    eventually(lambda: any(ended.items() <= e.items() for e in learner.events()), learner, "the last checkpoint")
    learner.kill()
    assert not (learner.run_dir / "summary.json").exists()
    learner = swarm.resume(learner, name="last")
    assert learner.wait() == 0, learner.output()
    for sampler in samplers:
        _says_goodbye(sampler)
        _all_that_was_told_is_on_record(learner, sampler)
    _is_one_run(learner, steps)
    summary = learner.summary()
    assert (summary["state"], summary["step"]) == ("finished", steps)
    assert summary["held_out"][-1]["version"] == steps


@pytest.mark.long
def test_a_demo_whose_learner_is_killed_ten_times_learns_all_the_same(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = run_command("demo", "--kill-learner", "10", "--json", "--run-dir", str(run_dir), timeout_s=560)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["learner_killed"], summary["verified"]) == (10, True)
    assert summary["held_out_after"] >= 0.9
    assert "--kill-seed" in done.stderr
    assert command("verify", str(run_dir)).returncode == 0
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, summary["steps"] + 1))
    for number in range(3):
        said = (run_dir / "logs" / f"sampler-{number}.log").read_text()
        assert said.count("; status: echo-node status") == 1
        assert "the run is finished; thank you" in said


# -- stopped, damaged, asked for too much --------------------------------------------------------------------


def _tear(path: Path) -> None:
    """As a write that was cut off in the middle of a line."""
    with path.open("ab") as file:
        file.write(b'{"step": 7, "rew')


def _damage(path: Path) -> None:
    """Another byte in the middle of a file of the same size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _says_what_it_keeps(learner: Learner) -> None:
    """When it is stopped."""
    learner.signal(signal.SIGTERM)
    assert learner.wait() == 128 + signal.SIGINT
    step, run_dir = _steps_written(learner)[-1], learner.run_dir
    keeps = f"{run_dir} keeps the checkpoint of step {step}; go on with:  echo-node lead --resume {run_dir}"
    assert learner.output().splitlines()[-1] == f"stopped at step {step} of 1000000; {keeps}"
    assert is_whole(checkpoint_path(run_dir / "checkpoints", step))


def _another_run_begins_with_its_model(swarm: Swarm, learner: Learner) -> None:
    before, step = (learner.run_dir / "config.json").read_bytes(), _steps_written(learner)[-1]
    given = ("--from", str(learner.run_dir), "--learning-rate", "2e-4", "--port", "0", "--steps", "1")
    fork = swarm.lead(*given, name="fork")
    swarm.scripted(fork.url(), name="other")
    assert fork.wait() == 0, fork.output()
    assert fork.says(f"a new run with the model of {learner.run_dir} after {step} steps, and a fresh optimiser")
    config = json.loads((fork.run_dir / "config.json").read_text())
    assert config["from"] == {"run": str(learner.run_dir), "step": step, "best": False, "model": "tiny"}
    assert (config["learning_rate"], config["groups_per_step"]) == (2e-4, 4)
    assert (learner.run_dir / "config.json").read_bytes() == before
    assert fork.output().splitlines()[-1] == f"finished at step 1; run directory {fork.run_dir}"
    fork.verified()


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_what_is_whole(swarm: Swarm) -> None:
    swarm.lead_with(selection="frontier")
    learner = swarm.lead("--port", "0", *OFTEN, *ENDLESS)
    sampler = swarm.scripted(learner.url(), name="sampler")
    url = learner.url()
    eventually(lambda: _has_taken(learner, 12), learner, "two checkpoints and more")
    _says_what_it_keeps(learner)
    _another_run_begins_with_its_model(swarm, learner)

    _tear(learner.run_dir / "metrics.jsonl")
    _tear(learner.run_dir / "events.jsonl")
    (learner.run_dir / "timeline.json").write_text("{")
    root = learner.run_dir / "checkpoints"
    before, newest = whole_checkpoints(root)[-2:]
    _damage(newest.path / "trainer.safetensors")
    shutil.copytree(before.path, checkpoint_path(root, 999_999).with_suffix(".partial"))

    steps = _rows(learner, "SELECT count(*) FROM batches")[0][0] + 5
    again = swarm.resume(learner, "--steps", str(steps), name="again")
    assert again.url() == url
    assert again.wait() == 0, again.output()
    assert again.says(f"training again on the recorded batches {before.step} to")
    assert again.says("the timeline of what was done begins again: ")
    _says_goodbye(sampler)

    # A finished run goes on if it may take more steps, and without a checkpoint it is made again from its record.
    shutil.rmtree(root)
    more = swarm.resume(again, "--steps", str(steps + 4), name="more")
    late = swarm.scripted(more.url(), name="late")
    assert more.wait() == 0, more.output()
    assert more.says("training again on the recorded batches 0 to")
    assert not more.says("the timeline of what was done begins again")
    _says_goodbye(late)
    _is_one_run(more, steps + 4)
    prompts = _rows(more, "SELECT number, prompt_number FROM groups")
    assert all(prompt // CANDIDATES == number for number, prompt in prompts)
    assert len({prompt % CANDIDATES for _, prompt in prompts}) > 1


def test_what_is_no_run_is_not_resumed(tmp_path: Path) -> None:
    assert "is not a run directory" in _refused("lead", "--resume", str(tmp_path))
    assert "is not a run directory" in _refused("lead", "--resume", str(tmp_path / "nowhere"))


@pytest.mark.long
@pytest.mark.parametrize("trained", [pytest.param((), id="all"), pytest.param(("--adapter", "4"), id="adapter")])
def test_node_and_trainer_killed_together_make_the_same_weights_again(swarm: Swarm, trained: tuple[str, ...]) -> None:
    """With a real model at the sampler, whose weights have to be those that the learner goes on with."""
    learner = swarm.lead("--port", "0", "--max-staleness", "0", *trained, *OFTEN, *ENDLESS)
    sampler = swarm.join(learner.url(), name="sampler")
    eventually(lambda: _has_taken(learner, 7), learner, "a checkpoint and more steps")
    children = learner.children()
    for process in (*children, psutil.Process(learner.process.pid)):
        process.kill()
    learner.wait()
    steps = _rows(learner, "SELECT count(*) FROM batches")[0][0] + 5
    again = swarm.resume(learner, "--steps", str(steps), name="again")
    assert again.wait() == 0, again.output()
    _says_goodbye(sampler)
    _is_one_run(again, steps)
    distances = [line["mismatch_kl"] for line in again.metrics() if "mismatch_kl" in line]
    assert max(distances) < 1e-3
    assert max(line["staleness/max"] for line in again.metrics()) == 0


@pytest.mark.long
def test_groups_that_were_replaced_are_on_record_and_a_new_life_goes_on(swarm: Swarm) -> None:
    """Of two answers without a model many have the same reward."""
    swarm.lead_with(dynamic_sampling=True, group_size=2, groups_per_step=8)
    learner = swarm.lead("--port", "0", *ENDLESS, *OFTEN)
    sampler = swarm.scripted(learner.url(), name="sampler")
    _takes(learner, 8)
    learner.kill()
    steps = _rows(learner, "SELECT count(*) FROM batches")[0][0] + 8
    again = swarm.resume(learner, "--steps", str(steps), name="again")
    assert again.wait() == 0, again.output()
    _says_goodbye(sampler)
    _is_one_run(again, steps)
    counted = _rows(again, "SELECT dropped_at, count(*) FROM groups WHERE reason = 'no_variance' GROUP BY dropped_at")
    assert len(counted) > steps / 2
    assert max(count for _, count in counted) <= 8
    flat = [line["frac_reward_zero_std"] for line in again.metrics()]
    assert sum(flat) / len(flat) < 0.5


@pytest.mark.long
def test_weights_that_cannot_be_made_again_are_replaced_by_a_later_incarnation(swarm: Swarm) -> None:
    learner = swarm.lead("--port", "0", *ENDLESS)
    sampler = swarm.scripted(learner.url(), name="sampler")
    eventually(lambda: _has_taken(learner, 4), learner, "a few steps, and no checkpoint")
    learner.kill()
    # Stands for a machine that computes otherwise: the batches are those on record, their weights are not.
    config = json.loads((learner.run_dir / "config.json").read_text())
    (learner.run_dir / "config.json").write_text(json.dumps({**config, "learning_rate": 2 * config["learning_rate"]}))

    steps = _rows(learner, "SELECT count(*) FROM batches")[0][0] + 5
    again = swarm.resume(learner, "--steps", str(steps), name="again")
    assert again.wait() == 0, again.output()
    _says_goodbye(sampler)
    assert "diverged" in _kinds(again)
    assert again.says("the next version replaces them")
    versions = _rows(again, "SELECT incarnation FROM versions ORDER BY version")
    assert versions[0] < versions[-1]
    assert _steps_written(again) == list(range(1, steps + 1))
    assert again.verified()["batches"] == steps


# -- the dial ------------------------------------------------------------------------------------------------


def _set(run_dir: Path, value: int) -> str:
    done = command("set", str(run_dir), f"max-staleness={value}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _bounds_are_kept(learner: Learner) -> None:
    """The metrics' ages against the bound that each batch was recorded with."""
    bounds = dict(_rows(learner, "SELECT step, max_staleness FROM batches"))
    for line in learner.metrics():
        assert line["staleness/max"] <= bounds[line["step"] - 1]


@pytest.mark.long
def test_the_bound_is_changed_while_the_learner_runs(swarm: Swarm) -> None:
    """In a directory whose name is too long for a socket."""
    name = "a" * 60 + "/" + "b" * 60
    (swarm.directory / ("a" * 60)).mkdir()
    learner = swarm.lead(
        "--port", "0", "--max-staleness", "4", "--publish-every-steps", "5", *OFTEN, *ENDLESS, name=name
    )
    run_dir, socket = learner.run_dir, learner.run_dir / "control.sock"
    assert len(str(socket)) > 107
    sampler = swarm.scripted(learner.url(), name="sampler")
    _takes(learner, 6)
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    assert max(line["staleness/max"] for line in learner.metrics()) == 4

    assert _set(run_dir, 0) == "max_staleness is 0 (was 4)"
    _takes(learner, 4)
    assert _set(run_dir, 2) == "max_staleness is 2 (was 0)"
    _takes(learner, 8)
    eventually(lambda: learner.status()["publish_every_steps"] == 3, learner, "the period comes back")
    assert "less than or equal to 1024" in _refused("set", str(run_dir), "max-staleness=2000")
    assert "cannot be set" in _refused("set", str(run_dir), "steps=3")
    learner.kill()
    assert [row[0] for row in _rows(learner, "SELECT max_staleness FROM bounds ORDER BY rowid")] == [4, 0, 2]
    assert "no learner runs in" in _refused("set", str(run_dir), "max-staleness=1")
    assert socket.exists()  # a killed learner leaves it behind

    again = swarm.resume(learner, name="again")
    _takes(again, 2)
    status = again.status()
    assert (status["max_staleness"], status["publish_every_steps"]) == (2, 3)
    assert _set(run_dir, 4) == "max_staleness is 4 (was 2)"
    _takes(again, 2)
    assert _set(run_dir, 1) == "max_staleness is 1 (was 4)"
    _takes(again, 3)
    again.signal(signal.SIGTERM)
    again.wait()
    assert not socket.exists()
    assert "no learner runs in" in _refused("set", str(run_dir), "max-staleness=1")
    bounds = [row[0] for row in _rows(again, "SELECT max_staleness FROM batches ORDER BY step")]
    assert [bound for i, bound in enumerate(bounds) if bound != bounds[i - 1] or i == 0] == [4, 0, 2, 4, 1]
    told = [line for line in again.events() if line["kind"] == "set"]
    assert {line["by"] for line in told} == {"socket"}
    changed = {
        key: [(line["before"], line["after"]) for line in told if line["key"] == key]
        for key in ("max_staleness", "publish_every_steps")
    }
    assert changed == {
        "max_staleness": [(4, 0), (0, 2), (2, 4), (4, 1)],
        # Capped by the bound, and as asked for again once the bound allows it, after a restart too.
        "publish_every_steps": [(5, 1), (1, 3), (3, 5), (5, 2)],
    }
    _bounds_are_kept(again)
    again.verified()
    assert sampler.process.poll() is None


@pytest.mark.long
def test_batches_are_trained_on_again_at_the_learning_rate_that_was_set_for_them(swarm: Swarm) -> None:
    """By a trainer that is started again, and by a learner: weights that were published come out bit for bit."""
    swarm.lead_with(warmup_steps=0)
    learner = swarm.lead("--port", "0", "--learning-rate", "1e-3", *ENDLESS)
    swarm.scripted(learner.url(), name="sampler")
    _takes(learner, 3)
    assert command("set", str(learner.run_dir), "learning-rate=1e-4").stdout == "learning_rate is 0.0001 (was 0.001)\n"
    _takes(learner, 3)
    trainer = next(child for child in learner.children() if "swarm.learner.trainer" in " ".join(child.cmdline()))
    trainer.kill()
    eventually(lambda: learner.says("training again on the recorded batches "), learner, "it trains again")
    _takes(learner, 2)
    assert command("set", str(learner.run_dir), "learning-rate=2e-4").returncode == 0
    _takes(learner, 2)
    learner.kill()
    again = swarm.resume(learner, name="again")
    _takes(again, 2)
    assert again.says("training again on the recorded batches ")
    assert "diverged" not in _kinds(again)
    rates = [line["learning_rate"] for line in again.metrics()]
    assert [rate for i, rate in enumerate(rates) if i == 0 or rate != rates[i - 1]] == [1e-3, 1e-4, 2e-4]
    table = {one["key"]: one["value"] for one in again.status()["settings"]}
    assert table["learning_rate"] == 2e-4
    again.kill()
    again.verified()


# -- a trainer that stands still -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_trainer_that_stands_still_is_replaced(swarm: Swarm) -> None:
    slow, soon = "tests.slow_steps 0 0", ("env", "TRAINER_HANG_S=10")
    learner = swarm.lead("--port", "0", *OFTEN, *ENDLESS, module=slow, place=soon)
    swarm.scripted(learner.url(), name="sampler")
    _takes(learner, 7)
    trainer = next(child for child in learner.children() if "swarm.learner.trainer" in " ".join(child.cmdline()))
    os.kill(trainer.pid, signal.SIGSTOP)
    line = "the trainer made no progress for 10 s and was killed; starting it again from the last checkpoint (1 of 3)"
    eventually(lambda: learner.says(line), learner, "the node says that its trainer hung")
    _takes(learner, 3)
    assert not trainer.is_running()
    assert {"trainer_restarted"} <= _kinds(learner)
    assert "diverged" not in _kinds(learner)
    learner.kill()
    learner.verified()
