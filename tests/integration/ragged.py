"""Copying with prompts of different lengths: what is drawn side by side is padded, and any digit has a reward."""

from __future__ import annotations

from random import Random

from swarm.types import Prompt, Score

LENGTHS = (1, 2, 4, 9)


class Ragged:
    """`31=` asks for `31`; each digit in its place counts."""

    description = "copy a few digits"
    max_new_tokens = 10

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        return _prompt(Random(f"{self._seed}/{index}"), f"ragged-{index}", LENGTHS[index % len(LENGTHS)])

    def held_out(self, count: int) -> list[Prompt]:
        """Longer than any to train on: beside one of them everything else is padded further."""
        return [_prompt(Random(f"held out/{index}"), f"held-out-{index}", 12 + index % 5) for index in range(count)]

    def score(self, prompt: Prompt, completion: str) -> Score:
        digits = sum(character.isdecimal() for character in completion)
        return Score(reward=digits / 10, exact=completion == prompt.answer)


def _prompt(draw: Random, name: str, digits: int) -> Prompt:
    number = "".join(str(draw.randrange(10)) for _ in range(digits))
    return Prompt(prompt_id=name, text=f"{number}=", answer=number)
