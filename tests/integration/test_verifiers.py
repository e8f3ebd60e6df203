"""verifiers 0.4 itself. That its environment server plays our taskset: test_episodes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.tasks.base import TaskOptions
from swarm.tasks.programs import verifiers_task
from tests.integration.processes import run_command

pytestmark = pytest.mark.integration


@pytest.mark.long
def test_a_taskset_that_is_not_there_ends_the_learner_before_anybody_joins(tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    place = ("--host", "127.0.0.1", "--port", "0", "--run-dir", str(tmp_path / "run"))
    done = run_command("lead", *place, "--model", "tiny", "--task", "verifiers:no_such")
    assert done.returncode == 2, done.stderr
    assert "echo-node: what plays the episodes cannot be loaded: " in done.stderr.splitlines()[-1]
    assert "'no_such' not found" in done.stderr.splitlines()[-1]


def test_a_lacking_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.tasks.programs.find_spec", lambda name: None)
    with pytest.raises(UserError, match="the extra `verifiers`"):
        verifiers_task(TaskOptions(name="verifiers:x"), "x")


def test_a_task_names_what_is_played_and_is_not_scored_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.tasks.programs.find_spec", lambda name: True)
    task = verifiers_task(TaskOptions(name="verifiers:x"), "x")
    names = [task.prompt(0).prompt_id, task.prompt(1).prompt_id, *(one.prompt_id for one in task.held_out(2))]
    assert names == ["train-0", "train-1", "heldout-0", "heldout-1"]
    played = task.environment()
    for ask in (lambda: task.score(task.prompt(0), ""), lambda: played.reset(0), lambda: played.step("")):
        with pytest.raises(UserError, match="played by a process of its own"):
            ask()
