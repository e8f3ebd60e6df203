"""Runs rewards in processes of their own, with limits of time and memory and without the node's secrets.

A process is started as a program, not forked from the node (process.py). It has a new session, no descriptor of the
node, and only the environment variables in process.INHERITED. So it is given neither the node's key nor a token in a
variable. But it runs as the same user in the same directory (tasks read files there) and can open every file of that
user: a reward that you do not trust needs a user or a container of its own.

If a reward raises or returns no finite score, only that completion fails. If it takes too long, or ends its process
twice, the completion fails too, and a new process scores the others. If a process is killed from outside, nothing
fails: a new one is started. The same holds for the steps of environments. An episode stays with one process; a new
process plays it again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from msgspec.structs import replace

from swarm.errors import ChildFailed, ChildHung, UserError
from swarm.process import Child, clean_environment
from swarm.tasks.reward_child import BeginRewards, Completion, Outcome, RewardReply, ScoreCall, StepCall
from swarm.types import Observed, Score, Unscored

__all__ = ["BeginRewards", "Completion", "RewardPool", "StepCall"]

Asked = TypeVar("Asked", Completion, StepCall)

LOAD_S = 600.0  # Longest wait for a process to load the task: libraries, and data sets of some millions of lines
MAX_DEATHS = 2  # Of processes over one completion. One may not be its fault: short of memory, the kernel kills any.
MAX_REASON = 400  # Characters of the reason why there is no score

SET = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "PYTHONSAFEPATH": "1",  # The user's modules come into the path only after ours are imported (Begin.path)
}
"""Defaults for variables that the node's environment does not set: the trainer needs the cores too."""


class RewardPool:
    """A few processes that decode and score completions. Each is started when it is first needed."""

    def __init__(self, begin: BeginRewards, *, timeout_s: float, processes: int = 1, logs: Path | None = None) -> None:
        """`timeout_s` is for one completion or turn. What rewards print goes into the directory `logs`, or where the
        node's own lines go."""
        log_files = [logs / f"rewards-{i}.log" if logs is not None else None for i in range(processes)]
        self._workers = [_Worker(begin, timeout_s, log) for log in log_files]
        self.processes = processes
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def start(self) -> None:
        """Have one process load the task, before any sampler works for it. UserError if it cannot."""
        if fault := await self._workers[-1].begin():
            raise UserError(fault)

    async def score(self, completions: Sequence[Completion], turn_s: float = math.inf) -> list[Score | Unscored]:
        """Score the completions that can begin within `turn_s`, at least one, and return their scores in order. The
        caller asks again for the rest, so that others can have the process in between. Waits for a free process without
        a limit: pacing bounds the number of callers."""
        worker = await self._free.get()
        try:
            outcomes = await worker.scored([_without_tokens(completion) for completion in completions], turn_s)
        finally:
            self._free.put_nowait(worker)
        return [outcome.score or Unscored(reason=outcome.fault[:MAX_REASON]) for outcome in outcomes]

    async def step(self, call: StepCall) -> Observed | Unscored:
        """Have an environment answer the last turn, or begin an episode. Waits for earlier steps without a limit:
        pacing bounds the number of callers."""
        outcome = await self._workers[crc32(call.episode.encode()) % len(self._workers)].outcome(_without_tokens(call))
        return Unscored(reason=outcome.fault[:MAX_REASON]) if outcome.fault else outcome.observed

    async def close(self) -> None:
        """End the processes and cancel all calls."""
        for worker in self._workers:
            await worker.close()


def _without_tokens(call: Asked) -> Asked:
    """A reward sees only texts, so the prompt's tokens are not sent."""
    return replace(call, prompt=replace(call.prompt, token_ids=()))


class _Worker:
    """One process. It answers one call at a time, so it is clear which call it died of. After `close` every call raises
    CancelledError, since a process that we ended ourselves must not count as a failure of the reward."""

    def __init__(self, begin: BeginRewards, timeout_s: float, log: Path | None) -> None:
        self._begin = begin
        self._child = Child(
            "reward process",
            "swarm.tasks.reward_child",
            log=log,
            hang_s=timeout_s,
            environment=lambda given: {**SET, **clean_environment(given)},
        )
        self._turn = asyncio.Lock()
        self._closed = False

    async def begin(self) -> str:
        """Start the process if it is not running, and have it load the task. Return why it cannot, or ""."""
        async with self._turn:
            return await self._begun()

    async def scored(self, completions: Sequence[Completion], turn_s: float) -> Sequence[Outcome]:
        """Score as RewardPool.score says. All go in one call. If the process dies or hangs, each goes in one of its
        own, since it is not known which one did it: a hang then costs its time limit twice."""
        fault = await self.begin()  # Loading does not count in turn_s
        if len(completions) > 1 and not fault:
            async with self._turn:
                try:
                    return await self._call(ScoreCall(completions=(*completions,), turn_s=turn_s))
                except ChildFailed:
                    await self._end()
        outcomes: list[Outcome] = []
        until = time.monotonic() + turn_s
        for completion in completions:
            if outcomes and time.monotonic() >= until:
                break
            outcomes.append(await self.outcome(ScoreCall(completions=(completion,), turn_s=turn_s)))
        return outcomes

    async def outcome(self, call: ScoreCall | StepCall) -> Outcome:
        async with self._turn:
            for death in range(1, MAX_DEATHS + 1):
                if fault := await self._begun():
                    return Outcome(fault=fault)
                try:
                    return (await self._call(call))[0]
                except ChildFailed as error:
                    await self._end()
                    if death == MAX_DEATHS or isinstance(error, ChildHung):
                        return Outcome(fault=str(error))
        raise AssertionError

    async def _call(self, call: BeginRewards | ScoreCall | StepCall, hang_s: float | None = None) -> Sequence[Outcome]:
        return (await self._child.call(call, RewardReply, hang_s=hang_s)).outcomes

    async def _end(self) -> None:
        await self._child.kill()  # Processes that it started may still run
        self._cancel_if_closed()

    async def _begun(self) -> str:
        self._cancel_if_closed()
        if self._child.is_running:
            return ""
        try:
            await self._child.start()
            fault = (await self._call(self._begin, LOAD_S))[0].fault
        except ChildFailed as error:
            fault = str(error)
        if fault or self._closed:  # `close` may have been called before there was a process to end
            await self._child.kill()
        self._cancel_if_closed()
        return f"a reward process cannot load the task {self._begin.task.name!r}: {fault}" if fault else ""

    def _cancel_if_closed(self) -> None:
        if self._closed:
            raise asyncio.CancelledError

    async def close(self) -> None:
        self._closed = True
        await self._child.kill()
