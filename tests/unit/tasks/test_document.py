"""docs/tasks.md: its example of a task of one's own runs, and what it says of numbers is so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from swarm.run import prompts
from swarm.tasks import DEFAULT_NEW_TOKENS, KINDS, TASKS, check_task, load_task
from swarm.tasks.base import TaskOptions
from swarm.tasks.questions import MAX_QUESTIONS
from swarm.tasks.rewards import REWARDS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()


def test_the_example_of_a_task_of_ones_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert len(code.split("class ")[1].splitlines()) <= 20
    (tmp_path / "backwards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = load_task(TaskOptions(name="python:backwards:Backwards", seed=7))
    check_task(task)
    trained = {task.prompt(i).text for i in range(200)}
    assert not trained & {prompt.text for prompt in task.held_out(4500)}
    prompt = task.held_out(1)[0]
    assert (task.score(prompt, "0001").reward, task.score(prompt, "1000").exact) == (1.0, False)


@pytest.mark.parametrize(
    "words",
    [
        *(f"| `{name}" for name in REWARDS),
        *(f"| `{name}" for name in TASKS),
        *(f"| `{name}:{kind.rest}` |" for name, kind in KINDS.items()),
        f"{MAX_QUESTIONS:,} questions",
        f"or {DEFAULT_NEW_TOKENS:,}",
        f"the first {prompts.LOOKED_AT} and",
        f"{prompts.PADDING_SHARE:.0%}".replace("%", " %"),
        f"{prompts.PADDING_TOKENS:,} entries",
    ],
)
def test_what_the_document_says_is_so(words: str) -> None:
    assert words in DOCUMENT
