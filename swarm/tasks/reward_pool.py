"""Rewards in processes of their own: timed, bounded in memory, and started without what the node knows.

A process is started as a program, not forked from the node (process.py). It has a new session, no descriptor of the
node, and only the environment variables in process.INHERITED. So neither the node's key nor a token in a variable
reaches a reward by itself. It still runs as the same user in the same directory (tasks read files there) and can open
every file of that user: a reward that you do not trust needs a user or a container of its own.

If a reward raises or returns no finite score, only that completion fails. If it takes too long, or ends its process
twice, the process is lost as well, and a new one scores the others. A process that was killed from outside costs only
its start. So it is with the steps of environments: an episode stays with one process, and a new one plays it again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from msgspec.structs import replace

from swarm.errors import ChildFailed, ChildHung, UserError
from swarm.process import Child, clean_environment
from swarm.tasks.reward_child import Begin, Completion, Outcome, StepAsked
from swarm.types import Observed, Score, Unscored

__all__ = ["Begin", "Completion", "RewardPool", "StepAsked"]

LOAD_S = 600.0  # Longest wait for a process to load the task: libraries, and a data set of some millions of lines
MAX_DEATHS = 2  # Of processes over one completion; the first may not be its fault (the kernel kills the largest)
MAX_REASON = 400  # Characters of why there is no score

SET = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "PYTHONSAFEPATH": "1",  # The user's own modules are found once ours are imported (Begin.path)
}
"""Defaults for variables that the node's environment does not set: the trainer needs the cores as well."""


class RewardPool:
    """A few processes that decode completions and score them; each is started when it is first needed."""

    def __init__(self, begin: Begin, *, timeout_s: float, processes: int = 1, logs: Path | None = None) -> None:
        """`timeout_s` is for one completion or turn. What rewards print goes into the directory `logs`, or where the
        node's own lines go."""
        log_files = [logs / f"rewards-{i}.log" if logs is not None else None for i in range(processes)]
        self._workers = [_Worker(begin, timeout_s, log) for log in log_files]
        self.processes = processes
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def start(self) -> None:
        """Have one process load the task before any sampler draws for it. UserError if it cannot."""
        if fault := await self._workers[-1].begin():
            raise UserError(fault)

    async def score(self, completions: Sequence[Completion], turn_s: float = math.inf) -> list[Score | Unscored]:
        """Scores in order, of those that begin within `turn_s`, at least one: then others can have the process before
        the caller asks for the rest. Waits for a free process without a limit: pacing bounds the callers."""
        worker = await self._free.get()
        outcomes: list[Score | Unscored] = []
        try:
            await worker.begin()  # Loading is not part of the turn
            until = time.monotonic() + turn_s
            while len(outcomes) < len(completions) and (not outcomes or time.monotonic() < until):
                outcome = await worker.outcome(completions[len(outcomes)])
                outcomes.append(outcome.score or Unscored(reason=outcome.fault[:MAX_REASON]))
        finally:
            self._free.put_nowait(worker)
        return outcomes

    async def step(self, asked: StepAsked) -> Observed | Unscored:
        """Have an environment answer the last turn, or begin. Steps wait for those before them without a limit: pacing
        bounds the callers."""
        outcome = await self._workers[crc32(asked.episode.encode()) % len(self._workers)].outcome(asked)
        return Unscored(reason=outcome.fault[:MAX_REASON]) if outcome.fault else outcome.observed

    async def close(self) -> None:
        """End the processes and cancel those who wait for them."""
        for worker in self._workers:
            await worker.close()


class _Worker:
    """One process, which answers one call at a time: so it is known which of them it died of. Once it is closed every
    call raises CancelledError: a process that we ended ourselves is no failure of the reward."""

    def __init__(self, begin: Begin, timeout_s: float, log: Path | None) -> None:
        self._begin = begin
        self._child = Child(
            "reward process",
            "swarm.tasks.reward_child",
            log=log,
            hang_s=timeout_s,
            environment=lambda given: {**SET, **clean_environment(given)},
        )
        self._turn = asyncio.Lock()

    async def begin(self) -> str:
        """Start the process if it is not running, and have it load the task. Return why it cannot, or ""."""
        async with self._turn:
            return await self._begun()

    async def outcome(self, asked: Completion | StepAsked) -> Outcome:
        # It sees texts alone, so prompts go without their tokens.
        sent = replace(asked, prompt=replace(asked.prompt, token_ids=()))
        async with self._turn:
            for death in range(1, MAX_DEATHS + 1):
                if fault := await self._begun():
                    return Outcome(fault=fault)
                try:
                    return await self._child.call(sent, Outcome)
                except ChildFailed as error:
                    await self._child.kill()  # What it started may have outlived it
                    self._cancel_if_closed()
                    if death == MAX_DEATHS or isinstance(error, ChildHung):
                        return Outcome(fault=str(error))
        raise AssertionError

    async def _begun(self) -> str:
        self._cancel_if_closed()
        if self._child.is_running:
            return ""
        try:
            await self._child.start()
            fault = (await self._child.call(self._begin, Outcome, hang_s=LOAD_S)).fault
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
