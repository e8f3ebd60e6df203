"""The interface of a task, its options, and the control reward that no policy can learn from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import msgspec

from swarm.environments.base import Environment
from swarm.errors import UserError
from swarm.types import Parts, Prompt, Score

RewardKind = Literal["task", "random"]
Boards = Callable[[Prompt, Sequence[str]], Sequence[str]]
Read = tuple[Callable[[int], Prompt], Callable[[Sequence[int]], str], Boards]
"""Three functions of a run: prompt by number, text of token ids, and the boards after the turns of an episode."""


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A task's name and settings, as plain data that can be sent to the reward processes. `rewards` are weights by
    name; if empty, the task chooses. The columns are those of a data set; `task_options` are for reasoning-gym."""

    name: str
    seed: int = 0
    rewards: dict[str, float] = {}
    lenient: bool = False
    columns: tuple[str, str] = ("prompt", "answer")
    stop: tuple[str, ...] = ()
    task_options: dict[str, Any] = {}


SEAT = 1  # The player in an episode that another program plays; player 0's tokens would have to follow the prompt


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an episode that another program played; with a `fault` it has no reward."""

    reward: float = 0.0
    parts: Parts = {}
    fault: str = ""


class Task(Protocol):
    """Prompts with a train and held-out split, and a reward. A class inherits the defaults if Task is its base.

    `max_new_tokens`: the longest completion that makes sense; None if only the user can know. `chat`: the prompts are
    questions, to be put into the model's chat template if it has one. `size`: the number of training prompts, after
    which they come again in another order; None if they never end. `data_digest`: digest of the data that was read, so
    that a run cannot be resumed with other data; "" for a task that makes its own prompts.

    `player`: an environment that is only asked for its limits, never played; None for a task of one turn.
    `is_external`: episodes are played by a program that asks the learner's endpoint for turns.

    The caller sets `progress`; a task calls it now and then while it works for long, and stops if it raises. A task
    imports no model library: rewards run in small processes, which create the task and only ask it for scores.
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
        """The training prompt number `index`: a pure function of it and the seed, so that a run's position is one
        number."""
        ...

    def held_out(self, count: int) -> Sequence[Prompt]:
        """Up to `count` prompts that `prompt` never returns; fewer if there are not as many."""
        ...

    def score(self, prompt: Prompt, completion: str) -> Score:
        """The reward of a completion, from its text alone."""
        ...

    def ready(self) -> None:
        """Load what scoring needs, which may take long. A reward process calls it before the first score."""
        return

    def environment(self) -> Environment:
        """A new environment for one episode at a time. Making it may take long, or start a process."""
        raise TypeError(f"{self.name} has no environment: its completions are scored")


def random_score(task: Task, prompt: Prompt, completion: str, seed: int) -> Score:
    """The control: a reward that does not depend on the completion. `exact` is still the task's."""
    reward = random.Random(seed).random()
    return Score(reward=reward, exact=task.score(prompt, completion).exact)


@contextmanager
def user_code(words: str) -> Iterator[None]:
    """Turn what the user's code raises into a UserError that begins with `words`."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{words} {type(error).__name__}: {error}") from error
