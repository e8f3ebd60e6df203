"""A process that computes rewards for scoring.RewardPool, which gives it an environment without secrets.

It reads one Begin and then Completions from its standard input and answers each with an Outcome, in order, on its
standard output. A frame is a 4-byte big-endian length and msgpack. What the reward prints goes to standard error.
"""

from __future__ import annotations

import io
import math
import os
import queue
import signal
import struct
import sys
import threading
from array import array
from collections.abc import Collection, Sequence
from typing import BinaryIO

import msgspec
from tokenizers import Tokenizer

from swarm.process import limit_memory
from swarm.tasks import load_task
from swarm.tasks.base import RewardKind, TaskOptions, random_score
from swarm.types import MAX_PARTS, PART_NAME_LENGTH, Prompt, Score


class Begin(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Which reward, and its limits. `tokenizer` is "" if completions come as texts, `path` is where to look for
    modules, `memory_bytes` limits the process's own memory (RLIMIT_DATA), on Linux alone."""

    task: TaskOptions
    reward: RewardKind
    tokenizer: str
    stop_token_ids: tuple[int, ...]
    memory_bytes: int
    path: tuple[str, ...]


class Completion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a reward process needs of one rollout. `token_ids` are int32, little-endian; `text` replaces them."""

    prompt: Prompt
    token_ids: bytes = b""
    seed: int = 0
    text: str | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A score, or why there is none. The answer to Begin, once the task is loaded, has neither."""

    score: Score | None = None
    fault: str = ""


def main() -> None:
    commands, answers = _take_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands, inbox), daemon=True).start()
    begin = msgspec.msgpack.decode(inbox.get(), type=Begin)
    sys.path[:] = begin.path
    limit_memory(begin.memory_bytes)
    try:
        task = load_task(begin.task)
        tokenizer = Tokenizer.from_file(begin.tokenizer) if begin.tokenizer else None
    except Exception as error:  # noqa: BLE001 - a user's task may raise anything
        _send(answers, Outcome(fault=said(error)))
        return
    _send(answers, Outcome())
    decoder = msgspec.msgpack.Decoder(Completion)
    while True:
        completion = decoder.decode(inbox.get())
        try:
            text = completion.text
            if text is None:
                assert tokenizer is not None
                text = completion_text(tokenizer, array("i", completion.token_ids), begin.stop_token_ids)
            if begin.reward == "random":
                score = random_score(task, completion.prompt, text, completion.seed)
            else:
                score = task.score(completion.prompt, text)
            outcome = Outcome(score=checked(score))
        except MemoryError:
            limit = f"{begin.memory_bytes >> 20} MiB that reward_memory_mb allows"
            outcome = Outcome(fault=f"it needs more memory than the {limit}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a reward may raise anything
            outcome = Outcome(fault=f"it raised {said(error)}")
        _send(answers, outcome)


def said(error: BaseException) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the pool, under numbers that neither a reward nor its children know; prints go elsewhere. Every
    other descriptor is closed, since not every event loop does so."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    low, high = sorted((commands.fileno(), answers.fileno()))
    for begin, end in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(begin, end)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # Line by line, so that the author sees what a reward printed before it was killed.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    return commands, answers


def _read(commands: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while len(size := commands.read(4)) == 4:
            inbox.put(commands.read(struct.unpack(">I", size)[0]))
    finally:
        # The pool is gone, and nobody needs the result.
        os._exit(0)


def _send(answers: BinaryIO, outcome: Outcome) -> None:
    answers.write(framed(msgspec.msgpack.encode(outcome)))


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def completion_text(tokenizer: Tokenizer, token_ids: Sequence[int], stop_token_ids: Collection[int]) -> str:
    """The text that a reward reads: the completion without the stop token at its end. Other special tokens stay in:
    a model would learn to hide things in them if no reward could see them."""
    kept = token_ids[:-1] if token_ids and token_ids[-1] in stop_token_ids else token_ids
    return str(tokenizer.decode(kept, skip_special_tokens=False))


def checked(score: object) -> Score:
    """`score` in plain types (a reward may be one of numpy's). Raises if nothing can be learned from it."""
    if not isinstance(score, Score):
        raise TypeError(f"a reward is a Score, not a {type(score).__name__}")
    parts = {str(name)[:PART_NAME_LENGTH]: float(part) for name, part in score.parts.items()}
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{len(parts)} parts of a reward are over the {MAX_PARTS} that are kept")
    found = Score(reward=float(score.reward), exact=bool(score.exact), parts=parts)
    for name, number in (("the reward", found.reward), *parts.items()):
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}, which is not a finite number")
    return found


if __name__ == "__main__":
    main()
