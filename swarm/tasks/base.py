"""What a task is, how one is asked for, and the control reward that no policy can learn from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from swarm.types import Prompt, Score

RewardKind = Literal["task", "random"]


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A task by its name, and what a user may set of it. Plain data: it goes to the reward processes.

    `rewards` are weights by name, none for the task's own choice, and `lenient` how they compare texts; the columns are
    those of a data set; a completion ends with one of the `stop` strings that it reached.
    """

    name: str
    seed: int = 0
    rewards: dict[str, float] = {}
    lenient: bool = False
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    held_out_share: float = 0.05
    stop: tuple[str, ...] = ()


class Task(Protocol):
    """Prompts with a train and held-out split, and a reward. A class that names Task as its base has the defaults.

    `max_new_tokens`: the longest completion that makes sense; None where only the user can say. `chat`: its prompts
    are questions that a chat template is put around, if the tokenizer has one. `size`: training prompts there are, None
    for no end of them; number `size` is the first of them again, in another order. `data_digest`: of what was read from
    outside, so that a resumed run is not given other data; "" for a task that makes its prompts.

    `progress` is set by who waits: a task that takes long to answer calls it now and then with how far it is. What it
    raises ends the work.

    Imports no model library: rewards run in small processes, which make the task and ask it for scores alone.
    """

    name: str
    description: str
    max_new_tokens: int | None
    chat: bool = False
    progress: Callable[[str], None] = staticmethod(lambda line: None)

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
        """Up to `count` prompts that `prompt` never gives: all there are, if there are fewer."""
        ...

    def score(self, prompt: Prompt, completion: str) -> Score:
        """The reward of a completion, from its text alone."""
        ...


def random_score(task: Task, prompt: Prompt, completion: str, seed: int) -> Score:
    """The control: a reward that has nothing to do with the completion. Exactness is still the task's."""
    reward = random.Random(seed).random()
    return Score(reward=reward, exact=task.score(prompt, completion).exact)
