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
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

from pebble import ProcessExpired, ProcessPool
from tokenizers import Tokenizer

from swarm.errors import EchoError
from swarm.tasks import load_task
from swarm.tasks.base import RewardKind, Task, TaskOptions, random_score
from swarm.types import Prompt, Score

MAX_PENDING = 256
"""Scoring calls under way at once; a call is one group's rollouts of one POST. More wait their turn."""


QUEUE_S = 60.0
"""A call that no process has begun after this long fails too: pebble's limit counts from the beginning."""


class RewardFailed(EchoError):
    """A reward function raised, returned no number, took too long, or ended its process twice."""


class _ProcessDied(EchoError):
    """A reward process ended before a call's scores were there. It may be no fault of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a reward process needs to know of one rollout."""

    prompt: Prompt
    token_ids: bytes
    seed: int


class RewardPool:
    """A few processes that decode completions and score them; one that hangs is killed and replaced.

    One that dies (of too little memory, most likely) is replaced too, and its call made once more. pebble sees to that
    when it dies in a call; when an idle one dies the pool is broken, and the first call that finds out makes a new one.
    """

    def __init__(
        self, *, task: TaskOptions, reward: RewardKind, tokenizer: Path, timeout_s: float, processes: int = 1
    ) -> None:
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(MAX_PENDING)
        self._closed = False
        self._new_pool = partial(
            ProcessPool,
            max_workers=processes,
            initializer=_start_worker,
            initargs=(task, reward, str(tokenizer)),
            # A forked copy of an event loop and its threads would not work; spawn starts clean.
            context=multiprocessing.get_context("spawn"),
        )
        self._pool = self._new_pool()

    async def score(self, completions: list[Completion]) -> list[Score]:
        """Scores in order; RewardFailed for the whole call if one of them fails or the time of all is up."""
        async with self._room:
            try:
                scores = await self._score_once(completions)
            except _ProcessDied:
                try:
                    scores = await self._score_once(completions)
                except _ProcessDied as error:
                    raise RewardFailed("the reward process died twice") from error
        if not all(math.isfinite(score.reward) for score in scores):
            raise RewardFailed("the reward is not a finite number")
        return scores

    async def _score_once(self, completions: list[Completion]) -> list[Score]:
        limit_s = self._timeout_s * len(completions)
        pool = self._pool
        try:
            future: Future[list[Score]] = pool.schedule(_score, args=(completions,), timeout=limit_s)
        except RuntimeError as error:
            await self._replace(pool)
            raise _ProcessDied from error
        try:
            async with asyncio.timeout(limit_s + QUEUE_S):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise RewardFailed(f"no {len(completions)} rewards within {limit_s:g} s") from error
        except ProcessExpired as error:
            raise _ProcessDied from error
        except BrokenProcessPool as error:
            await self._replace(pool)
            raise _ProcessDied from error
        except Exception as error:
            raise RewardFailed(f"the reward raised {type(error).__name__}: {error}") from error

    async def _replace(self, broken: ProcessPool) -> None:
        """A new pool in the place of `broken`, unless another call has put one there already."""
        if self._pool is broken and not self._closed:
            # Before anything is awaited: calls that find the same pool broken must not make one each.
            self._pool = self._new_pool()
            await asyncio.to_thread(_end, broken)

    def close(self) -> None:
        self._closed = True
        _end(self._pool)


def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


_task: Task
_reward: RewardKind
_tokenizer: Tokenizer


def _start_worker(task: TaskOptions, reward: RewardKind, tokenizer: str) -> None:
    global _task, _reward, _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _task, _reward, _tokenizer = load_task(task), reward, Tokenizer.from_file(tokenizer)


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
