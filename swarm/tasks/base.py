"""What a task is, how one is asked for, and the control reward that no policy can learn from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from swarm.environments.base import Environment
from swarm.types import Prompt, Score

RewardKind = Literal["task", "random"]
Boards = Callable[[Prompt, Sequence[str]], Sequence[str]]
Read = tuple[Callable[[int], Prompt], Callable[[Sequence[int]], str], Boards]
"""A run's prompts by number, the text of token ids, and the boards after the turns of an episode, if it has any."""


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A task's name and settings. Plain data, which is sent to the reward processes. `rewards` are weights by name,
    empty for the task's own choice. The columns are those of a data set, and `task_options` reasoning-gym's."""

    name: str
    seed: int = 0
    rewards: dict[str, float] = {}
    lenient: bool = False
    columns: tuple[str, str] = ("prompt", "answer")
    stop: tuple[str, ...] = ()
    task_options: dict[str, Any] = {}


class Task(Protocol):
    """Prompts with a train and held-out split, and a reward. A class that names Task as its base has the defaults.

    `max_new_tokens`: the longest completion that makes sense; None if only the user can say. `chat`: the prompts are
    questions, to be put into the model's chat template if it has one. `size`: how many training prompts there are, None
    if they never end; from number `size` on they come again, in another order. `data_digest`: of data that was read, so
    that a resumed run is refused other data; "" for a task that makes its prompts.

    `player`: an environment of this task, to ask for its limits and never to be played; None for a task of one turn.
    `is_external`: its episodes are played by a program that asks the learner's endpoint for turns.

    The caller sets `progress`; a task that takes long to answer calls it now and then. If it raises, the work ends. A
    task imports no model library: rewards run in small processes, which make the task and only ask it for scores.
    """

    name: str
    description: str
    max_new_tokens: int | None
    chat: bool = False
    progress: Callable[[str], None] = staticmethod(lambda line: None)
    player: Environment | None = None
    is_external: bool = False

    @property
    def size(self) -> int | None:
        return None

    @property
    def data_digest(self) -> str:
        return ""

    def prompt(self, index: int) -> Prompt:
        """The index-th training prompt: a pure function of the seed and `index`, so that a cursor is one number."""
        ...

    def held_out(self, count: int) -> Sequence[Prompt]:
        """Up to `count` prompts that `prompt` never gives; fewer if there are fewer."""
        ...

    def score(self, prompt: Prompt, completion: str) -> Score:
        """The reward of a completion, from its text alone."""
        ...

    def environment(self) -> Environment:
        """A new environment that an episode is played in; to make one may take long, or start a process."""
        raise TypeError(f"{self.name} has no environment: its completions are scored")


def random_score(task: Task, prompt: Prompt, completion: str, seed: int) -> Score:
    """The control: a reward that does not depend on the completion. `exact` is still the task's."""
    reward = random.Random(seed).random()
    return Score(reward=reward, exact=task.score(prompt, completion).exact)
