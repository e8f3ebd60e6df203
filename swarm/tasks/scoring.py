"""Rewards in processes of their own: bounded, timed, and started without the node's memory."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import threading
from array import array
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from pebble import ProcessExpired, ProcessPool
from tokenizers import Tokenizer

from swarm.errors import EchoError
from swarm.tasks import load_task
from swarm.tasks.base import RewardKind, Task, random_score
from swarm.types import Prompt, Score

MAX_PENDING = 256
"""Scoring calls under way at once; a call is one group's rollouts of one POST. More wait their turn."""


QUEUE_S = 60.0
"""A call that no process has begun after this long fails too: pebble's limit counts from the beginning."""


class RewardFailed(EchoError):
    """A reward function raised, returned no number, or took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a reward process needs to know of one rollout."""

    prompt: Prompt
    token_ids: bytes
    seed: int


class RewardPool:
    """A few processes that decode completions and score them; one that hangs is killed and replaced."""

    def __init__(
        self, *, task: str, seed: int, reward: RewardKind, tokenizer: Path, timeout_s: float, processes: int = 1
    ) -> None:
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(MAX_PENDING)
        self._pool = ProcessPool(
            max_workers=processes,
            initializer=_start_worker,
            initargs=(task, seed, reward, str(tokenizer)),
            # A forked copy of an event loop and its threads would not work; spawn starts clean.
            context=multiprocessing.get_context("spawn"),
        )

    async def score(self, completions: list[Completion]) -> list[Score]:
        """Scores in order; RewardFailed for the whole call if one of them fails or the time of all is up."""
        limit_s = self._timeout_s * len(completions)
        async with self._room:
            future: Future[list[Score]] = self._pool.schedule(_score, args=(completions,), timeout=limit_s)
            try:
                scores = await asyncio.wait_for(asyncio.wrap_future(future), limit_s + QUEUE_S)
            except TimeoutError as error:
                raise RewardFailed(f"no {len(completions)} rewards within {limit_s:g} s") from error
            except ProcessExpired as error:
                raise RewardFailed("the reward process died") from error
            except Exception as error:
                raise RewardFailed(f"the reward raised {type(error).__name__}: {error}") from error
        if not all(math.isfinite(score.reward) for score in scores):
            raise RewardFailed("the reward is not a finite number")
        return scores

    def close(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


_task: Task
_reward: RewardKind
_tokenizer: Tokenizer


def _start_worker(task: str, seed: int, reward: RewardKind, tokenizer: str) -> None:
    global _task, _reward, _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _task, _reward, _tokenizer = load_task(task, seed), reward, Tokenizer.from_file(tokenizer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)


def _score(completions: list[Completion]) -> list[Score]:
    return [_score_one(completion) for completion in completions]


def _score_one(completion: Completion) -> Score:
    text = _tokenizer.decode(array("i", completion.token_ids), skip_special_tokens=True)
    if _reward == "random":
        return random_score(_task, completion.prompt, text, completion.seed)
    return _task.score(completion.prompt, text)
