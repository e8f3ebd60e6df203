"""The data plane: tasks give prompts and rewards. A new task touches neither training nor scheduling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.digits import CopyTask, SortTask
from swarm.tasks.episodes import environment_task
from swarm.tasks.gym import GymTask
from swarm.tasks.hub import hub_task
from swarm.tasks.own import own_task
from swarm.tasks.programs import agent_task, verifiers_task
from swarm.tasks.questions import jsonl_task

if TYPE_CHECKING:
    from swarm.settings import LeadConfig


class Kind(NamedTuple):
    """A kind of task, named KIND:REST: what REST looks like, a description, and the function that makes the task."""

    rest: str
    description: str
    make: Callable[[TaskOptions, str], Task]


TASKS: dict[str, Callable[[int], Task]] = {"copy": CopyTask, "sort": SortTask}
"""Tasks that make their own prompts, from the run's seed."""

KINDS: dict[str, Kind] = {
    "jsonl": Kind("FILE", "questions with answers, one JSON object a line", jsonl_task),
    "hf": Kind("DATASET[:CONFIG][@SPLIT]", "a data set of the Hugging Face hub, a directory or a file", hub_task),
    "gym": Kind("NAME[?OPTION=VALUE&...]", "questions without end that reasoning-gym makes and scores", GymTask),
    "python": Kind("MODULE:CLASS[:KEY=VALUE,...]", "a task or an environment of your own", own_task),
    "agent": Kind("FILE.py:FUNCTION[@jsonl:FILE]", "an async function that asks an OpenAI client", agent_task),
    "verifiers": Kind("MODULE", "a taskset of verifiers, which its own server plays", verifiers_task),
}

ENVIRONMENTS = {"frozen-lake": "frozen_lake:FrozenLake", "gymnasium": "gymnasium:GymnasiumText"}
"""Modules and classes in swarm/environments/, imported only when used. NAME:KEY=VALUE,... sets options."""

DEFAULT_NEW_TOKENS = 1024  # Longest completion if neither the user nor the task sets one: some paragraphs of reasoning


def task_options(config: LeadConfig) -> TaskOptions:
    """The settings of a run that its task needs; they have the same names."""
    same = {name: getattr(config, name) for name in TaskOptions.__struct_fields__ if name not in ("name", "rewards")}
    return TaskOptions(name=config.task, rewards=config.own_rewards, **same)


def load_task(options: TaskOptions) -> Task:
    """The task that `options` name. A data set is not read before its first question is asked for. UserError for an
    unknown task or reward, with the names of the known ones."""
    name, colon, rest = options.name.partition(":")
    if colon and name in KINDS:
        return KINDS[name].make(options, rest)
    if options.name not in TASKS and name not in ENVIRONMENTS:
        known = (*sorted(TASKS), *ENVIRONMENTS, *(f"{kind}:{KINDS[kind].rest}" for kind in KINDS))
        raise UserError(f"there is no task {options.name!r}; known tasks: {', '.join(known)}")
    if name in ENVIRONMENTS:
        return environment_task(options, ENVIRONMENTS[name], rest)
    return TASKS[options.name](options.seed)


def check_task(task: Task) -> None:
    """Ask for a training and a held-out prompt, which reads the data set. UserError if there is none."""
    if task.size == 0:
        raise UserError(f"the task {task.name} is empty: it has no training prompt")
    task.prompt(0)
    if not task.held_out(1):
        raise UserError(f"the task {task.name} has no held-out prompt to measure what is learned")
