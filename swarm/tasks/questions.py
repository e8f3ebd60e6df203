"""Tasks with a finite set of questions and known answers: how they are read, split, ordered and scored.

`jsonl:FILE` reads one JSON object a line. If any line has the field `held_out`, these fields make the split. Otherwise
a digest of the question decides: the split is the same for every seed and every order of the file, and stays when
questions are added. No question is on both sides. Each epoch goes through all training questions in a new order.
"""

from __future__ import annotations

import codecs
import json
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.functions import RewardFunction, is_function
from swarm.tasks.rewards import checked_weights, weighted_score
from swarm.types import Prompt, Score
from swarm.wire import digest, encode

MAX_QUESTIONS = 1_000_000  # Of a data set: about a kilobyte each in memory, and more than 30,000 steps use
HELD_OUT_SHARE = 0.05  # Of the questions, where the data itself does not say which are held out
MAX_ID_LENGTH = 64  # As in types.Id
MAX_BYTES = 4 << 30  # Of a file: a million questions of a page each
ROLES = ("system", "user", "assistant")
WHOLE_ROW = ("", "")  # Columns of which neither is a question: the row is one, whatever it has


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions of a data set. `held_out` is None if the data set has no split of its own. `digest` is that of the
    content."""

    train: list[Prompt]
    held_out: list[Prompt] | None
    digest: str


class QuestionTask(Task):
    """The questions are not read before the first is asked for: a reward process needs none of them."""

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
        own = {name: function(prompt, completion, options.columns) for name, function in self._functions.items()}
        is_lenient = options.lenient
        return weighted_score(self._weights, completion, prompt.answer, options.stop, is_lenient=is_lenient, own=own)

    def ready(self) -> None:
        assert self._functions is not None

    @cached_property
    def _functions(self) -> dict[str, RewardFunction]:
        """The user's, which are loaded in reward processes alone."""
        return {name: RewardFunction(name) for name in self._weights if is_function(name)}

    @cached_property
    def _questions(self) -> Questions:
        return self._read(self._options)

    @cached_property
    def _split(self) -> tuple[list[Prompt], list[Prompt]]:
        return split(self._questions, self._options)


def split(questions: Questions, options: TaskOptions) -> tuple[list[Prompt], list[Prompt]]:
    """The training questions, and the held-out ones in the order of their digests. UserError if a side is empty."""
    name = options.name
    if not questions.train and not questions.held_out:
        raise UserError(f"{name} is empty: it has no question")
    if questions.held_out is not None:
        held_out = sorted(questions.held_out, key=question_digest)
        known = {question_digest(prompt) for prompt in held_out}
        train = [prompt for prompt in questions.train if question_digest(prompt) not in known]
    else:
        held_out = sorted((p for p in questions.train if is_held_out(p)), key=question_digest)
        train = [prompt for prompt in questions.train if not is_held_out(prompt)]
    for side, words in ((held_out, "held out"), (train, "left to train on")):
        if not side:
            has = f"it has {len(questions.train)}; add questions, or say in their lines which are held_out"
            own = "the file itself says which are held out: change that, or remove held_out from all lines"
            raise UserError(f"no question of {name} is {words}: {has if questions.held_out is None else own}")
    return train, held_out


def is_held_out(prompt: Prompt) -> bool:
    return int.from_bytes(question_digest(prompt)[:8], "big") < HELD_OUT_SHARE * 2.0**64


def question_digest(prompt: Prompt) -> bytes:
    """The digest of what the model reads, without the id and the answer."""
    return digest(encode(prompt.messages or prompt.text))


def permutation(size: int, seed: str) -> array[int]:
    """0 .. size - 1 in an order drawn from `seed`."""
    order = list(range(size))
    random.Random(f"epoch/{seed}").shuffle(order)
    return array("l", order)


def prompt_id(given: str, prompt: Prompt) -> str:
    """The id `given` in a data set, or the question's digest if there is none. A long id is cut, and ends with its
    digest."""
    if not given:
        return f"q-{question_digest(prompt).hex()[:16]}"
    if len(given) <= MAX_ID_LENGTH:
        return given
    return f"{given[: MAX_ID_LENGTH - 17]}~{digest(given.encode()).hex()[:16]}"


# -- reading ---------------------------------------------------------------------------------------------------


def jsonl_task(options: TaskOptions, path: str) -> Task:
    """The task of the file at `path`, which is not read before its first question is asked for."""

    def read(options: TaskOptions) -> Questions:
        return read_questions(Path(path), options, at=lambda number: f"{path}:{number}")

    return QuestionTask(options, f"questions of {path}", read)


def read_questions(path: Path, options: TaskOptions, at: Callable[[int], str]) -> Questions:
    """The questions of a file and the digest of its bytes. UserError for a line that is not a question; `at` turns the
    number of a line into words for it."""
    content, seen, has_split = blake3(), dict[str, int](), False
    train, held_out = list[Prompt](), list[Prompt]()
    for number, line in read_lines(path):
        content.update(line)
        if not line.strip():
            continue
        prompt, side = _question(line, options, at(number))
        # Two lines may ask the same question, but an id given in the file must be unique.
        first = seen.setdefault(prompt.prompt_id, number)
        if first != number and prompt.prompt_id != prompt_id("", prompt):
            raise UserError(f"{at(number)}: the id {prompt.prompt_id!r} is already that of {at(first)}")
        has_split |= side is not None
        (held_out if side else train).append(prompt)
        if len(train) + len(held_out) > MAX_QUESTIONS:
            raise UserError(f"{at(number)}: a task has at most {MAX_QUESTIONS:,} questions")
    return Questions(train=train, held_out=held_out if has_split else None, digest=content.hexdigest())


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers. UserError if it cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES >> 30} GiB, the limit for a file of questions")
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _question(line: bytes, options: TaskOptions, place: str) -> tuple[Prompt, bool | None]:
    """The prompt of a line, and its field `held_out`."""
    try:
        row = as_written(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8: save the file in that encoding") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f'{place} is not a JSON object: a line looks like {{"prompt": "2+2=", "answer": "4"}}')
    whole = options.columns == WHOLE_ROW
    if whole:
        row[""] = line.decode().strip()
    for column in options.columns:
        if row.get(column) is None:
            if column in row:
                raise UserError(f"{place}: the {column!r} is null: give it a value, or leave the line out")
            has = ", ".join(map(str, row)) or "nothing"
            raise UserError(f"{place} has no {column!r}, only {has}: add it, or name others with columns")
    question, answer = (row[column] for column in options.columns)
    text, messages = _prompt_of(question, place)
    answer = _as_text(answer, f"{place}: the answer")
    kept = line.decode().strip() if whole or any(map(is_function, options.rewards)) else ""
    prompt = Prompt(prompt_id="-", text=text, answer=answer, messages=messages, row=kept)
    if not isinstance(row.get("held_out", False), bool):
        raise UserError(f"{place}: held_out is true or false, or left out")
    given = "" if row.get("id") is None else _as_text(row["id"], f"{place}: the id")
    return msgspec.structs.replace(prompt, prompt_id=prompt_id(given, prompt)), row.get("held_out")


def _prompt_of(prompt: Any, place: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The content of the last message, and all messages if there are several."""
    if isinstance(prompt, str):
        if not prompt:
            raise UserError(f"{place}: the prompt is empty")
        return prompt, ()
    if not isinstance(prompt, list) or not prompt:
        raise UserError(f"{place}: a prompt is a string or a list of chat messages")
    turns = []
    for message in prompt:
        match message:
            case {"role": str() as role, "content": str() as content} if role in ROLES:
                turns.append((role, content))
            case _:
                raise UserError(f'{place}: a message has a "role" ({", ".join(ROLES)}) and a "content" of text')
    if turns[-1][0] != "user":
        raise UserError(f"{place}: the last message of a prompt is the user's, not the {turns[-1][0]}'s")
    return turns[-1][1], tuple(turns) if len(turns) > 1 else ()


def as_written(text: str) -> Any:
    """Parse JSON, but keep fractions as the text that was written, and read NaN as null. ValueError if it is not JSON,
    or a key comes twice."""
    found = json.loads(text, parse_float=str, parse_constant=lambda _: None, object_pairs_hook=_object)
    json.dumps(found, ensure_ascii=False).encode()  # Raises for half of a surrogate pair
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"a key comes twice among {', '.join(name for name, _ in pairs)}")
    return found


def _as_text(value: Any, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UserError(f"{what} is neither text nor a number")
    return str(value)
