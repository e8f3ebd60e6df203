"""`jsonl:FILE`: questions and answers, one JSON object a line."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from swarm.errors import UserError
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.questions import MAX_QUESTIONS, Questions, QuestionTask, prompt_id
from swarm.types import Prompt

MAX_BYTES = 4 << 30  # Of a file: what a million questions of a page each take
ROLES = ("system", "user", "assistant")


def jsonl_task(options: TaskOptions, path: str) -> Task:
    """The task of the file at `path`, which is read when its first question is asked for."""

    def read(options: TaskOptions) -> Questions:
        prompts, digest = read_questions(Path(path), options, at=lambda number: f"{path}:{number}")
        return Questions(train=prompts, held_out=None, digest=digest)

    return QuestionTask(options, f"questions of {path}", read)


def read_questions(path: Path, options: TaskOptions, at: Callable[[int], str]) -> tuple[list[Prompt], str]:
    """The questions of a file and the digest of its bytes. UserError, with the place that `at` says of a line, for
    a line that is no question."""
    content, prompts, seen = blake3(), list[Prompt](), dict[str, int]()
    for number, line in _lines(path):
        content.update(line)
        if not line.strip():
            continue
        prompt = _question(line, options, at(number))
        # Two rows may ask the same; but one who gives an id means one row by it.
        if (first := seen.setdefault(prompt.prompt_id, number)) != number and b'"id"' in line:
            raise UserError(f"{at(number)}: the id {prompt.prompt_id!r} is that of {at(first)} already")
        prompts.append(prompt)
        if len(prompts) > MAX_QUESTIONS:
            raise UserError(f"{at(number)}: a task has at most {MAX_QUESTIONS:,} questions")
    return prompts, content.hexdigest()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES >> 30} GiB, the most that a task may read")
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except OSError as error:
        raise UserError(f"cannot read the questions in {path}: {error.strerror}") from error


def _question(line: bytes, options: TaskOptions, place: str) -> Prompt:
    try:
        row = msgspec.json.decode(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8: save the file in that encoding") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f'{place} is no JSON object: a line looks like {{"prompt": "2+2=", "answer": "4"}}')
    for column, setting in ((options.prompt_column, "prompt_column"), (options.answer_column, "answer_column")):
        if row.get(column) is None:
            if column in row:
                raise UserError(f"{place}: the {column!r} is null: give it a value, or leave the line out")
            has = ", ".join(map(str, row)) or "nothing"
            raise UserError(f"{place} has no {column!r}, only {has}: add it, or name another with {setting}")
    text, messages = _asked(row[options.prompt_column], place)
    answer = _as_text(row[options.answer_column], f"{place}: the answer")
    prompt = Prompt(prompt_id="-", text=text, answer=answer, messages=messages)
    given = row.get("id")
    return msgspec.structs.replace(
        prompt, prompt_id=prompt_id("" if given is None else _as_text(given, f"{place}: the id"), prompt)
    )


def _asked(asked: Any, place: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The last question, and all turns if it is a chat of more than one."""
    if isinstance(asked, str):
        if not asked:
            raise UserError(f"{place}: the prompt is empty")
        return asked, ()
    if not isinstance(asked, list) or not asked:
        raise UserError(f"{place}: a prompt is a string or a list of chat messages")
    turns = []
    for message in asked:
        match message:
            case {"role": str() as role, "content": str() as content} if role in ROLES:
                turns.append((role, content))
            case _:
                raise UserError(f'{place}: a message has a "role" ({", ".join(ROLES)}) and a "content" of text')
    if turns[-1][0] != "user":
        raise UserError(f"{place}: the last message of a prompt is the user's, not the {turns[-1][0]}'s")
    return turns[-1][1], tuple(turns) if len(turns) > 1 else ()


def _as_text(value: Any, what: str) -> str:
    match value:
        case str():
            return value
        case bool():
            pass
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return repr(value)
    raise UserError(f"{what} is neither a text nor a number")
