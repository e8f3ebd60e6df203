"""The data plane: tasks give prompts and rewards. A new task touches neither training nor scheduling."""

from __future__ import annotations

from collections.abc import Callable

from swarm.errors import UserError
from swarm.tasks.base import Task
from swarm.tasks.copy import CopyTask
from swarm.tasks.sort import SortTask

TASKS: dict[str, Callable[[int], Task]] = {"copy": CopyTask, "sort": SortTask}
"""Tasks by name; each is made from the run's seed."""


def load_task(name: str, seed: int) -> Task:
    """The task called `name`; UserError with the known names if there is none."""
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}; known tasks: {', '.join(sorted(TASKS))}")
    return TASKS[name](seed)
