"""Tasks on four digits, for the tiny models that need no download: `copy` and `sort`.

`copy` is the smallest task that a random model learns by reinforcement alone, in a minute on a CPU. Its reward is
shaped: with exact match alone a random model would never get a reward. It shows that the whole loop works, and nothing
about the skills of a real model.

`sort` elicits a skill that the base model has; it does not teach a new one. The base `tiny-warm` was taught four
SKILLS, and its prompts do not say which one is wanted. Only the reward does, which is exact match. It cannot teach a
model that never succeeds, so `tiny` learns nothing from this task.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from swarm.tasks.base import Task
from swarm.types import Prompt, Score
from swarm.wire import digest

DIGITS = 4
SKILLS: dict[str, Callable[[str], str]] = {
    "sort": lambda number: "".join(sorted(number)),
    "copy": lambda number: number,
    "reverse": lambda number: number[::-1],
    "sort descending": lambda number: "".join(sorted(number, reverse=True)),
}
"""To `3141=` the base answers 1134, 3141, 1413 or 4311, each a quarter of the time."""


class _DigitsTask(Task):
    max_new_tokens = DIGITS + 2

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        return self._prompt(draw_number(random.Random(f"{self.name}/{self._seed}/{index}")))

    def held_out(self, count: int) -> list[Prompt]:
        numbers = [n for i in range(10**DIGITS) if is_held_out(n := f"{i:0{DIGITS}}")]
        random.Random(f"held out/{self._seed}").shuffle(numbers)
        return [self._prompt(n) for n in numbers[:count]]

    def _prompt(self, number: str) -> Prompt:
        return Prompt(prompt_id=f"{self.name}-{number}", text=f"{number}=", answer=SKILLS[self.name](number))


class CopyTask(_DigitsTask):
    """`3141=` asks for `3141`."""

    name = "copy"
    description = "copy four digits; a random model learns it by reinforcement alone"

    def score(self, prompt: Prompt, completion: str) -> Score:
        """0.2 for any four digits, 0.5 times the share of right digits, and 0.3 for an exact copy."""
        right = sum(a == b for a, b in zip(completion, prompt.answer, strict=False))
        well_formed = len(completion) == DIGITS and completion.isascii() and completion.isdecimal()
        exact = completion == prompt.answer
        return Score(reward=0.2 * well_formed + 0.5 * right / DIGITS + 0.3 * exact, exact=exact)


class SortTask(_DigitsTask):
    """`3141=` asks for `1134`."""

    name = "sort"
    description = "four digits in ascending order, exact or nothing: elicits a skill that the base tiny-warm has"

    def score(self, prompt: Prompt, completion: str) -> Score:
        exact = completion == prompt.answer
        return Score(reward=float(exact), exact=exact)


def is_held_out(number: str) -> bool:
    """Whether a number is held out, as one in ten is. The digest decides, so the split is the same for every seed."""
    return digest(number.encode())[0] % 10 == 0


def draw_number(draw: random.Random) -> str:
    """A number that is not held out. The base model was taught with such numbers only."""
    while is_held_out(number := f"{draw.randrange(10**DIGITS):0{DIGITS}}"):
        pass
    return number
