"""docs/environments.md: its example runs, and its table has every environment."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from swarm.tasks import ENVIRONMENTS, check_task, load_task
from swarm.tasks.base import TaskOptions

DOCUMENT = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


def test_the_example_of_an_environment_of_ones_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    (tmp_path / "higher.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = load_task(TaskOptions(name="python:higher:Higher", seed=7))
    check_task(task)
    environment = task.environment()
    low, high = 1, 100
    environment.reset(3)
    for _ in range(environment.max_turns):
        step = environment.step(str(guess := (low + high) // 2))
        if step.done:
            break
        low, high = (guess + 1, high) if step.messages[0][1] == "Higher." else (low, guess - 1)
    assert step.solved


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_document_has_every_environment(name: str) -> None:
    assert f"`{name}" in DOCUMENT.partition("## Baselines")[0]
