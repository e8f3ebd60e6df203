"""A learner that dies, is stopped or is told to change, as real processes: nothing is lost, and the run goes on."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import time
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from swarm.learner.checkpoint.files import checkpoint_path, is_whole, whole_checkpoints
from swarm.rollout.plane.frontier import CANDIDATES
from tests.integration import killed_commit, telling_sampler
from tests.integration.processes import Learner, Node, Swarm, command, eventually

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
    step = _steps_written(learner)[-1]
    given = ("--from", str(learner.run_dir), "--learning-rate", "2e-4", "--port", "0", "--steps", "1")
    fork = swarm.lead(*given, name="fork")
    swarm.scripted(fork.url(), name="other")
    assert fork.wait() == 0, fork.output()
    assert fork.says(f"a new run with the model of {learner.run_dir} after {step} steps, and a fresh optimiser")
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


@pytest.mark.long
def test_node_and_trainer_killed_together_make_the_same_adapter_again(swarm: Swarm) -> None:
    """With a real model at the sampler, whose weights have to be those that the learner goes on with."""
    learner = swarm.lead("--port", "0", "--max-staleness", "0", "--adapter", "4", *OFTEN, *ENDLESS)
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
    """What becomes of the period, and what is refused: tests/unit/lead."""
    learner = swarm.lead("--port", "0", "--max-staleness", "4", "--publish-every-steps", "5", *OFTEN, *ENDLESS)
    run_dir = learner.run_dir
    swarm.scripted(learner.url(), name="sampler")
    _takes(learner, 6)
    assert max(line["staleness/max"] for line in learner.metrics()) == 4
    assert _set(run_dir, 0) == "max_staleness is 0 (was 4)"
    _takes(learner, 4)
    assert _set(run_dir, 2) == "max_staleness is 2 (was 0)"
    _takes(learner, 8)
    learner.kill()
    assert [row[0] for row in _rows(learner, "SELECT max_staleness FROM bounds ORDER BY rowid")] == [4, 0, 2]

    again = swarm.resume(learner, name="again")
    _takes(again, 2)
    status = again.status()
    assert (status["max_staleness"], status["publish_every_steps"]) == (2, 3)
    assert _set(run_dir, 1) == "max_staleness is 1 (was 2)"
    newest = "SELECT max_staleness FROM batches ORDER BY step DESC LIMIT 1"
    eventually(lambda: _rows(again, newest) == [(1,)], again, "a batch under that bound")
    again.signal(signal.SIGTERM)
    again.wait()
    bounds = [row[0] for row in _rows(again, "SELECT max_staleness FROM batches ORDER BY step")]
    assert [bound for i, bound in enumerate(bounds) if bound != bounds[i - 1] or i == 0] == [4, 0, 2, 1]
    _bounds_are_kept(again)
    again.verified()
