"""docs/tasks.md and docs/environments.md: their examples run, and what they say of names and numbers is so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from swarm.run import prompts
from swarm.tasks import DEFAULT_NEW_TOKENS, ENVIRONMENTS, KINDS, TASKS, check_task, load_task
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.questions import MAX_QUESTIONS
from swarm.tasks.rewards import REWARDS

DOCS = Path(__file__).parents[3] / "docs"
OF_TASKS, OF_ENVIRONMENTS = (DOCS / "tasks.md").read_text(), (DOCS / "environments.md").read_text()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def example(document: str, place: Path, module: str, name: str) -> Task:
    (code,) = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)
    (place / f"{module}.py").write_text(code)
    task = load_task(TaskOptions(name=f"python:{module}:{name}", seed=7))
    check_task(task)
    return task


def test_the_example_of_a_task_of_ones_own_runs(place: Path) -> None:
    task = example(OF_TASKS, place, "backwards", "Backwards")
    trained = {task.prompt(i).text for i in range(200)}
    assert not trained & {prompt.text for prompt in task.held_out(4500)}
    prompt = task.held_out(1)[0]
    assert (task.score(prompt, "0001").reward, task.score(prompt, "1000").exact) == (1.0, False)


def test_the_example_of_an_environment_of_ones_own_runs(place: Path) -> None:
    environment = example(OF_ENVIRONMENTS, place, "higher", "Higher").environment()
    low, high = 1, 100
    environment.reset(3)
    for _ in range(environment.max_turns):
        step = environment.step(str(guess := (low + high) // 2))
        if step.done:
            break
        low, high = (guess + 1, high) if step.messages[0][1] == "Higher." else (low, guess - 1)
    assert step.solved


@pytest.mark.parametrize(
    "words",
    [
        *(f"| `{name}" for name in (*REWARDS, *TASKS)),
        *(f"| `{name}:{kind.rest}` |" for name, kind in KINDS.items()),
        f"{MAX_QUESTIONS:,} questions",
        f"or {DEFAULT_NEW_TOKENS:,}",
        f"the first {prompts.LOOKED_AT} and",
        f"{prompts.PADDING_SHARE:.0%}".replace("%", " %"),
        f"{prompts.PADDING_TOKENS:,} entries",
    ],
)
def test_what_the_document_says_is_so(words: str) -> None:
    assert words in OF_TASKS


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_document_has_every_environment(name: str) -> None:
    assert f"`{name}" in OF_ENVIRONMENTS.partition("## Baselines")[0]
