"""Environments as tasks: their starts, their options, and those of the user."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swarm.environments.frozen_lake import FrozenLake
from swarm.errors import UserError
from swarm.run.prompts import longest_completion
from swarm.settings import LeadConfig
from swarm.tasks import check_task, load_task
from swarm.tasks.base import TaskOptions
from swarm.tasks.episodes import EnvironmentTask
from swarm.types import Prompt


def _seed(prompt: Prompt) -> int:
    return int(prompt.prompt_id.rpartition("-")[2])


@pytest.mark.parametrize("name", ["frozen-lake", "python:examples.environments.puzzles:KnightsAndKnaves"])
def test_training_and_held_out_starts_never_meet(name: str) -> None:
    held_out = {prompt.messages for prompt in load_task(TaskOptions(name=name)).held_out(16)}
    assert len(held_out) == 16
    for seed in (0, 1):
        task = load_task(TaskOptions(name=name, seed=seed))
        check_task(task)
        trained = [task.prompt(index) for index in range(300)]
        assert not held_out & {prompt.messages for prompt in trained}
        assert load_task(TaskOptions(name=name, seed=seed)).prompt(7) == trained[7]
        environment = task.environment()
        assert tuple(environment.reset(_seed(trained[7]))) == trained[7].messages
        assert trained[7].text == (environment.board() or trained[7].messages[-1][1])
    assert load_task(TaskOptions(name=name, seed=1)).prompt(0) != load_task(TaskOptions(name=name, seed=2)).prompt(0)


def test_an_environment_is_made_for_an_episode_and_not_for_a_look_at_the_task() -> None:
    made: list[FrozenLake] = []

    def make() -> FrozenLake:
        made.append(FrozenLake())
        return made[-1]

    task = EnvironmentTask(TaskOptions(name="frozen-lake"), make)
    assert (task.max_new_tokens, task.size, task.name) == (1, None, "frozen-lake")
    assert longest_completion(LeadConfig(model="tiny", task="frozen-lake"), task) > 0
    assert task.prompt(0).messages
    with pytest.raises(TypeError, match="turn by turn"):
        task.score(task.prompt(0), "1")
    assert made == [task.player]
    assert task.environment() is made[1]


def test_options_are_those_of_the_environment() -> None:
    for name in ("frozen-lake:size=5,holes=2", "frozen-lake:5"):
        prompt = load_task(TaskOptions(name=name)).prompt(0)
        assert len(prompt.messages[-1][1]) == 25 + 8
        assert [len(row) for row in prompt.text.splitlines()] == [5] * 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("frozen-lake:5,6", "names an option twice"),
        ("frozen-lake:sise=3", r"unknown field `sise`; .* these keys: \['size', 'holes'\]"),
        ("frozen-lake:size=big", "Expected `int`, got `str` - at `\\$.size`"),
        ("frozen-lake:size=10", "size is from 2 to 9"),
        ("frozen-lake:holes=6", "a third of the cells at most"),
        ("python:examples.environments.puzzles:Sokoban:boxes=3", "boxes from 1 to size - 2"),
        ("python:examples.environments.puzzles:KnightsAndKnaves:people=9", r"Invalid enum value 9 - at `\$.people`"),
        ("frozen", "known tasks: .*frozen-lake"),
    ],
)
def test_a_wrong_option_is_told_in_a_line(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_task(TaskOptions(name=name))


OWN = '''
from swarm.environments.base import Step


class Count:
    """Count to three."""

    max_turns = 5

    def reset(self, seed):
        self.said = 0
        return "Count to three."

    def step(self, text):
        self.said += 1
        right = text == str(self.said)
        return "Go on.", float(right and self.said == 3), not right or self.said == 3


class Pairs(Count):
    max_new_tokens = 7

    def reset(self, seed):
        return [("system", "Be short."), ("user", f"Say {seed % 1000}.")]

    def step(self, text):
        return Step(rewards=(0.5,), done=True)


class Endless(Count):
    max_turns = 0


class Broken(Count):
    def reset(self, seed):
        return 1 / 0

    def step(self, text):
        return "one"
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_worlds.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "python:own_worlds:"


def test_an_environment_of_the_users(own: str) -> None:
    task = load_task(TaskOptions(name=own + "Count"))
    environment = task.environment()
    assert (task.description, environment.max_turns) == ("Count to three.", 5)
    # It always begins with the same words, so other seeds are held out.
    held_out, trained = task.held_out(8), [task.prompt(index) for index in range(50)]
    assert len({*map(_seed, held_out), *map(_seed, trained)}) == 58
    assert environment.reset(0) == [("user", "Count to three.")]
    steps = [environment.step(text) for text in "123"]
    assert [step.rewards for step in steps] == [(0.0,), (0.0,), (1.0,)]
    assert [(step.done, step.solved) for step in steps] == [(False, False), (False, False), (True, True)]
    assert steps[0].messages == [("user", "Go on.")]
    task = load_task(TaskOptions(name=own + "Pairs"))
    assert task.max_new_tokens == 7
    assert task.prompt(0).messages[0] == ("system", "Be short.")
    assert task.environment().step("").rewards == (0.5,)


def test_faults_of_the_users_environment_are_told(own: str) -> None:
    with pytest.raises(UserError, match="set max_turns, from 1 to 512"):
        load_task(TaskOptions(name=own + "Endless"))
    task = load_task(TaskOptions(name=own + "Broken"))
    with pytest.raises(UserError, match=r"reset\(\d+\) of python:own_worlds:Broken raised ZeroDivisionError"):
        task.prompt(0)
    environment = task.environment()
    with pytest.raises(TypeError, match=r"returned neither a Step nor \(messages, reward, done\)"):
        environment.step("")
