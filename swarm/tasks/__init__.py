"""The data plane: tasks give prompts and rewards. A new task touches neither training nor scheduling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.copy import CopyTask

if TYPE_CHECKING:
    from swarm.config import LeadConfig

TASKS: dict[str, Callable[[int], Task]] = {"copy": CopyTask}
"""Tasks that make their own prompts, by name; each is made from the run's seed."""


DEFAULT_NEW_TOKENS = 1024
"""Longest completion where neither the user nor the task says one: room for a few paragraphs of reasoning."""


def task_options(config: LeadConfig) -> TaskOptions:
    """The task that a run is about."""
    return TaskOptions(
        name=config.task,
        seed=config.seed,
        rewards=config.rewards,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        held_out_share=config.held_out_share,
    )


def load_task(options: TaskOptions) -> Task:
    """The task that `options` name; UserError with the known names if there is none."""
    if options.name not in TASKS:
        raise UserError(f"there is no task {options.name!r}; known tasks: {', '.join(sorted(TASKS))}")
    return TASKS[options.name](options.seed)
