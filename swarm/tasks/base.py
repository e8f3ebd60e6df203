"""What a task is, and the control reward that no policy can learn from."""

from __future__ import annotations

import random
from typing import Literal, Protocol

from swarm.types import Prompt, Score

RewardKind = Literal["task", "random"]


class Task(Protocol):
    """Prompts with a train and held-out split, and a reward.

    Imports no model library: rewards run in small processes.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_new_tokens(self) -> int:
        """Longest completion that makes sense."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The index-th training prompt: a pure function of the seed and `index`, so that a cursor is one number."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """Up to `count` prompts that `prompt` never gives: all there are, if there are fewer."""
        ...

    def score(self, prompt: Prompt, completion: str) -> Score:
        """The reward of a completion, from its text alone."""
        ...


def random_score(task: Task, prompt: Prompt, completion: str, seed: int) -> Score:
    """The control: a reward that has nothing to do with the completion. Exactness is still the task's."""
    reward = random.Random(seed).random()
    return Score(reward=reward, exact=task.score(prompt, completion).exact)
