"""Tasks with a finite set of questions and known answers: how they are split, ordered and scored.

The split goes by a digest of the question, so that it is the same for every seed, every order of the file and after
questions were added, and the same question is never on both sides. Training goes through all questions of its side
in an order that is drawn anew for each epoch: number i is place i % size of epoch i // size.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from swarm.errors import UserError
from swarm.net.wire import digest, encode
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.rewards import checked_weights, weighted_score
from swarm.types import Prompt, Score

MAX_QUESTIONS = 1_000_000  # Of a data set: in memory about a kilobyte each, and more than a run of 30,000 steps asks
ID_CHARACTERS = 64  # As types.Id has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What was read. `held_out`: a split of its own if the data set has one, else None. `digest` is of the content."""

    train: list[Prompt]
    held_out: list[Prompt] | None
    digest: str


class QuestionTask(Task):
    """Questions are read when the first is asked for: a reward process needs none of them."""

    max_new_tokens = None
    chat = True

    def __init__(self, options: TaskOptions, description: str, read: Callable[[TaskOptions], Questions]) -> None:
        self.name = options.name
        self.description = description
        self._options = options
        self._read = read
        self._weights = checked_weights(options.rewards, is_lenient=options.lenient)
        self._order: tuple[int, array[int]] = (-1, array("l"))

    @property
    def size(self) -> int:
        return len(self._split[0])

    @property
    def data_digest(self) -> str:
        return self._questions.digest

    def prompt(self, index: int) -> Prompt:
        train, _ = self._split
        epoch, place = divmod(index, len(train))
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(train), f"{self._options.seed}/{epoch}"))
        return train[self._order[1][place]]

    def held_out(self, count: int) -> Sequence[Prompt]:
        return self._split[1][:count]

    def score(self, prompt: Prompt, completion: str) -> Score:
        options = self._options
        return weighted_score(self._weights, completion, prompt.answer, options.stop, is_lenient=options.lenient)

    @cached_property
    def _questions(self) -> Questions:
        return self._read(self._options)

    @cached_property
    def _split(self) -> tuple[list[Prompt], list[Prompt]]:
        return split(self._questions, self._options)


def split(questions: Questions, options: TaskOptions) -> tuple[list[Prompt], list[Prompt]]:
    """Questions to train on, and those held out in the order of their digests. UserError if a side is empty."""
    name, share = options.name, options.held_out_share
    if not questions.train:
        raise UserError(f"{name} is empty: it has no question")
    if questions.held_out is not None:
        held_out = sorted(questions.held_out, key=question_digest)
        known = {question_digest(prompt) for prompt in held_out}
        train = [prompt for prompt in questions.train if question_digest(prompt) not in known]
    else:
        held_out = sorted((p for p in questions.train if is_held_out(p, share)), key=question_digest)
        train = [prompt for prompt in questions.train if not is_held_out(prompt, share)]
    for side, words in ((held_out, "held out"), (train, "left to train on")):
        if not side:
            raise UserError(
                f"no question of {name} is {words}: it has {len(questions.train)}, and held_out_share is {share:g}; "
                "add questions or set another share"
            )
    return train, held_out


def is_held_out(prompt: Prompt, share: float) -> bool:
    """The split: by digest of the question, so that it is the same for every seed."""
    return int.from_bytes(question_digest(prompt)[:8], "big") < share * 2.0**64


def question_digest(prompt: Prompt) -> bytes:
    """Of all that the model is asked, whatever its id and answer."""
    return digest(encode(prompt.messages or prompt.text))


def permutation(size: int, seed: str) -> array[int]:
    """0 .. size - 1 in an order drawn from `seed`."""
    order = list(range(size))
    random.Random(f"epoch/{seed}").shuffle(order)
    return array("l", order)


def prompt_id(given: str, prompt: Prompt) -> str:
    """The id that a data set gives, if it fits; a longer one ends with its digest. Without one, of the question."""
    if not given:
        return f"q-{question_digest(prompt).hex()[:16]}"
    if len(given) <= ID_CHARACTERS:
        return given
    return f"{given[: ID_CHARACTERS - 17]}~{digest(given.encode()).hex()[:16]}"
