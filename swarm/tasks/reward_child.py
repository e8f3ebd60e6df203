"""A process that computes rewards for scoring.RewardPool, which gives it an environment with nothing secret in it.

Frames are a 4-byte big-endian length and msgpack, over what were its standard input and output: one Begin, then
Completions; an Outcome to each, in order. What the reward prints goes to standard error. It ends when its pool is gone.
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

from swarm.tasks import load_task
from swarm.tasks.base import RewardKind, Task, TaskOptions, random_score
from swarm.types import MAX_PARTS, PART_NAME_LENGTH, Prompt, Score

MAX_SAID = 200  # Characters of a reason: a line for a person


class Begin(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Which reward, and what it may take. `tokenizer` is "" where completions come as texts, `path` is where modules
    are looked for, `memory_bytes` a limit on what the process holds for itself (RLIMIT_DATA), which only Linux keeps.
    """

    task: TaskOptions
    reward: RewardKind
    tokenizer: str
    stop_token_ids: tuple[int, ...]
    memory_bytes: int
    path: tuple[str, ...]


class Completion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a reward process needs to know of one rollout. `token_ids` are int32, little-endian, unless `text` is what
    they say."""

    prompt: Prompt
    token_ids: bytes = b""
    seed: int = 0
    text: str | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A score, or why there is none; neither, in answer to Begin, once the task is loaded."""

    score: Score | None = None
    fault: str = ""


def main() -> None:
    commands, answers = _take_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands, inbox), daemon=True).start()
    begin = msgspec.msgpack.decode(inbox.get(), type=Begin)
    sys.path[:] = begin.path
    _limit_memory(begin.memory_bytes)
    try:
        task = load_task(begin.task)
        tokenizer = Tokenizer.from_file(begin.tokenizer) if begin.tokenizer else None
    except Exception as error:  # noqa: BLE001 - a task of one's own may raise anything
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
            outcome = Outcome(score=_score(task, begin.reward, text, completion))
        except MemoryError:
            limit_mb = begin.memory_bytes >> 20
            outcome = Outcome(fault=f"it needs more memory than the {limit_mb} MiB that reward_memory_mb allows")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a reward may raise anything
            outcome = Outcome(fault=f"it raised {said(error)}")
        _send(answers, outcome)


def said(error: BaseException) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_SAID]


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the pool, under numbers that neither a reward nor what it starts knows; prints go elsewhere. All
    else that is open is closed: not every event loop does so when it starts a process."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    low, high = sorted((commands.fileno(), answers.fileno()))
    for begin, end in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(begin, end)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # What a reward prints before it is killed is told to its author.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    return commands, answers


def _limit_memory(nbytes: int) -> None:
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = nbytes if most == resource.RLIM_INFINITY else min(nbytes, most)
        # Not RLIMIT_AS: a data set that is mapped from a file takes addresses and no memory of its own.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(commands: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while len(size := commands.read(4)) == 4:
            inbox.put(commands.read(struct.unpack(">I", size)[0]))
    finally:
        # The pool is gone: whatever is being computed is of no use to anybody.
        os._exit(0)


def _send(answers: BinaryIO, outcome: Outcome) -> None:
    answers.write(framed(msgspec.msgpack.encode(outcome)))


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def completion_text(tokenizer: Tokenizer, token_ids: Sequence[int], stop_token_ids: Collection[int]) -> str:
    """What a reward reads: all that was drawn but the stop token at its end. Other special tokens stay in it: a model
    would hide them in its answers if no reward could see them."""
    kept = token_ids[:-1] if token_ids and token_ids[-1] in stop_token_ids else token_ids
    return str(tokenizer.decode(kept, skip_special_tokens=False))


def _score(task: Task, reward: RewardKind, text: str, completion: Completion) -> Score:
    if reward == "random":
        return checked(random_score(task, completion.prompt, text, completion.seed))
    return checked(task.score(completion.prompt, text))


def checked(score: object) -> Score:
    """`score` in plain types (a reward may be of numpy's); raises for one that nothing can be learned from."""
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
