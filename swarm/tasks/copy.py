"""Copy four digits: the smallest task that a random model learns by reinforcement alone, in a minute on a CPU.

The reward is shaped (0.2 for four digits, 0.5 for the share of right places, 0.3 for an exact copy): with exact
match alone a random model never sees a reward and never learns. What it shows is that the whole loop works; it says
nothing about any skill of a real model.
"""

from __future__ import annotations

import random

from swarm.net.wire import digest
from swarm.tasks.base import Task
from swarm.types import Prompt, Score

DIGITS = 4
HELD_OUT_SHARE = 10  # One number in ten is held out


class CopyTask(Task):
    """`3141=` asks for `3141`."""

    name = "copy"
    description = "copy four digits; a random model learns it by reinforcement alone"
    max_new_tokens = DIGITS + 2

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        draw = random.Random(f"copy/{self._seed}/{index}")
        while is_held_out(number := f"{draw.randrange(10**DIGITS):0{DIGITS}}"):
            pass
        return _prompt(number)

    def held_out(self, count: int) -> list[Prompt]:
        numbers = [n for i in range(10**DIGITS) if is_held_out(n := f"{i:0{DIGITS}}")]
        random.Random(f"held out/{self._seed}").shuffle(numbers)
        return [_prompt(n) for n in numbers[:count]]

    def score(self, prompt: Prompt, completion: str) -> Score:
        right = sum(a == b for a, b in zip(completion, prompt.answer, strict=False))
        well_formed = len(completion) == DIGITS and completion.isascii() and completion.isdecimal()
        exact = completion == prompt.answer
        return Score(reward=0.2 * well_formed + 0.5 * right / DIGITS + 0.3 * exact, exact=exact)


def is_held_out(number: str) -> bool:
    """The split: by digest, so that it is the same for every seed."""
    return digest(number.encode())[0] % HELD_OUT_SHARE == 0


def _prompt(number: str) -> Prompt:
    return Prompt(prompt_id=f"copy-{number}", text=f"{number}=", answer=number)
