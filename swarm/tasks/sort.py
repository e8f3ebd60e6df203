"""Sort four digits, with exact match as the only reward: for a model that can do it now and then already.

What it shows is elicitation of a skill that the base has, not the learning of a new one. The base `tiny-warm` was
taught four SKILLS that its prompts do not tell apart, and shows each a quarter of the time; the reward says which one
is wanted. Exact match alone teaches a model nothing that never does it, so `tiny` stays where it is on this task.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from swarm.tasks.base import Task
from swarm.tasks.copy import DIGITS, is_held_out
from swarm.types import Prompt, Score

SKILLS: dict[str, Callable[[str], str]] = {
    "sort": lambda number: "".join(sorted(number)),
    "copy": lambda number: number,
    "reverse": lambda number: number[::-1],
    "sort descending": lambda number: "".join(sorted(number, reverse=True)),
}
"""What the base answers to `3141=`, each a quarter of the time: 1134, 3141, 1413 or 4311."""


class SortTask(Task):
    """`3141=` asks for `1134`."""

    name = "sort"
    description = "four digits in ascending order, exact or nothing: elicits a skill that the base tiny-warm has"
    max_new_tokens = DIGITS + 2

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        return _prompt(draw_number(random.Random(f"sort/{self._seed}/{index}")))

    def held_out(self, count: int) -> list[Prompt]:
        numbers = [n for i in range(10**DIGITS) if is_held_out(n := f"{i:0{DIGITS}}")]
        random.Random(f"held out/{self._seed}").shuffle(numbers)
        return [_prompt(n) for n in numbers[:count]]

    def score(self, prompt: Prompt, completion: str) -> Score:
        exact = completion == prompt.answer
        return Score(reward=float(exact), exact=exact)


def draw_number(draw: random.Random) -> str:
    """A number that is not held out; the base was taught with none that is."""
    while is_held_out(number := f"{draw.randrange(10**DIGITS):0{DIGITS}}"):
        pass
    return number


def _prompt(number: str) -> Prompt:
    return Prompt(prompt_id=f"sort-{number}", text=f"{number}=", answer=SKILLS["sort"](number))
