"""Rewards in processes of their own: timed, bounded in memory, and started without what the node knows.

A process is started as a program, not forked from the node. It has a new session, no descriptor of the node but its
pipes, and only the environment variables in process.INHERITED. So neither the node's key nor a token in a variable
reaches a reward by itself. It still runs as the same user in the same directory (tasks read files there) and can open
every file of that user: a reward that you do not trust needs a user or a container of its own.

If a reward raises or returns no finite score, only that completion fails. If it takes too long, or ends its process
twice, the process is lost as well, and a new one scores the others. A process that was killed from outside costs only
its start. So it is with the steps of environments: an episode stays with one process, and a new one plays it again.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from msgspec.structs import replace

from swarm.errors import EchoError, UserError
from swarm.process import clean_environment, read_frame
from swarm.tasks.base import RewardKind, TaskOptions
from swarm.tasks.reward_child import Begin, Completion, EpisodeOptions, Outcome, StepAsked, framed
from swarm.types import MAX_TOKENS, Observed, Score, Unscored

__all__ = ["Completion", "EpisodeOptions", "RewardPool", "StepAsked"]

START_S = 600.0  # Longest wait for a process to load the task: libraries, and a data set of some millions of lines

MAX_DEATHS = 2  # Of processes over one completion; the first may not be its fault (the kernel kills the largest)
OUTCOME_BYTES = 4 * MAX_TOKENS + 64 * 1024  # Largest frame of an answer: an observation, whose parts are 2 kB at most
MAX_IN_FLIGHT = 64  # Steps that a process is sent at once: it need not wait, and few are sent again if it ends
LAST_WORDS_S = 1.0  # Wait for what a process printed before it ended; its children may hold the pipe open
SAID_BYTES = 2048  # Kept of what a process printed, for the reason of its end

SET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
"""Defaults for variables that the node's environment does not set: the trainer needs the cores as well."""

CLOSED = "the rewards are closed"


class _Broken(EchoError):
    """No process can be started, or it cannot load the task."""


class _Lost(EchoError):
    """The process gave no answer and was ended: it took too long, or had ended by itself ("")."""


class RewardPool:
    """A few processes that decode completions and score them; each is started when it is first needed."""

    def __init__(
        self,
        *,
        task: TaskOptions,
        reward: RewardKind,
        tokenizer: Path | None,
        stop_token_ids: Sequence[int] = (),
        timeout_s: float,
        memory_mb: int = 4096,
        processes: int = 1,
        episodes: EpisodeOptions | None = None,
        secrets: Sequence[Path] | None = None,
        heard: Callable[[bytes], None] | None = None,
    ) -> None:
        """`tokenizer` is None if completions come as texts. `timeout_s` is for one completion or turn, `memory_mb` in
        MiB for one process, on Linux alone. `heard` is called with what rewards print. If `secrets` are given, the
        processes are confined as an engine's is (confine.py), and cannot read these files."""
        begin = Begin(
            task=task,
            reward=reward,
            tokenizer=str(tokenizer.absolute()) if tokenizer is not None else "",
            stop_token_ids=tuple(stop_token_ids),
            memory_bytes=memory_mb << 20,
            path=module_path(),
            episodes=episodes,
        )
        confined = () if secrets is None else ("confined", *(str(path.absolute()) for path in secrets))
        self._workers = [_Worker(begin, timeout_s, heard or (lambda said: None), confined) for _ in range(processes)]
        self._closed = False
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def start(self) -> None:
        """Have one process load the task before any sampler draws for it. UserError if it cannot."""
        try:
            await self._workers[-1].begin()
        except _Broken as error:
            raise UserError(str(error)) from error

    async def score(self, completions: Sequence[Completion], turn_s: float = math.inf) -> list[Score | Unscored]:
        """Scores in order, of those that begin within `turn_s`, at least one: then others can have the process before
        the caller asks for the rest. Waits for a free process without a limit: pacing bounds the callers."""
        worker = await self._free.get()
        outcomes: list[Score | Unscored] = []
        try:
            with suppress(_Broken):
                await worker.begin()
            until = time.monotonic() + turn_s
            while len(outcomes) < len(completions) and (not outcomes or time.monotonic() < until):
                # One by one: a process does not give back what it was sent.
                outcomes += [outcome async for outcome in worker.outcomes([completions[len(outcomes)]])]
        finally:
            self._free.put_nowait(worker)
        if self._closed:
            # We ended its process ourselves; that must not be recorded as a failure of the reward.
            raise asyncio.CancelledError
        return outcomes

    async def step(self, asked: StepAsked) -> tuple[Observed, ...] | Unscored:
        """Have an environment answer the new turns, up to the episode's end. Return an answer to each, or one if none
        is new. Steps wait for those before them without a limit: pacing bounds the callers."""
        answer = await self._workers[crc32(asked.episode.encode()) % len(self._workers)].step(asked)
        if self._closed:
            raise asyncio.CancelledError
        return answer

    async def close(self) -> None:
        """End the processes and cancel those who wait for them."""
        self._closed = True
        for worker in self._workers:
            await worker.close()


class _Worker:
    def __init__(
        self, begin: Begin, timeout_s: float, heard: Callable[[bytes], None], arguments: Sequence[str]
    ) -> None:
        self._arguments = arguments
        self._begin = begin
        self._timeout_s = timeout_s
        self._heard = heard
        self._process: asyncio.subprocess.Process | None = None
        self._printed = bytearray()
        self._listening: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._status = 0
        self._steps: list[tuple[StepAsked, asyncio.Future[tuple[Observed, ...] | Unscored]]] = []
        self._stepping: asyncio.Task[None] | None = None

    async def step(self, asked: StepAsked) -> tuple[Observed, ...] | Unscored:
        answer: asyncio.Future[tuple[Observed, ...] | Unscored] = asyncio.get_running_loop().create_future()
        self._steps.append((asked, answer))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_all())
        return await asyncio.shield(answer)  # A step that is given up is answered all the same

    async def _step_all(self) -> None:
        """Ask until no step waits, again for those after one that cost the process."""
        while batch := self._steps[:MAX_IN_FLIGHT]:
            async for outcome in self.outcomes([asked for asked, _ in batch]):
                self._steps.pop(0)[1].set_result(outcome)

    async def outcomes(self, asked: Sequence[Completion | StepAsked]) -> AsyncIterator[Any]:
        """Yield outcomes in order, up to the first that cost a process."""
        done = deaths = 0
        while done < len(asked):
            try:
                process = await self.begin()
                assert process.stdin is not None
                # All at once: they are in memory anyway, and the process reads while it works. It sees texts alone, so
                # prompts go without their tokens.
                for one in asked[done:]:
                    sent = replace(one, prompt=replace(one.prompt, token_ids=()))
                    process.stdin.write(framed(msgspec.msgpack.encode(sent)))
                for one in asked[done:]:
                    outcome = await self._outcome(process, one)
                    done, deaths = done + 1, 0
                    yield outcome
            except _Broken as error:
                for _ in asked[done:]:
                    yield Unscored(reason=str(error)[:400])
                return
            except (_Lost, OSError) as lost:
                fault = str(lost) if isinstance(lost, _Lost) else ""
                deaths += 1
                if fault or deaths >= MAX_DEATHS:
                    yield Unscored(reason=fault or self._end)
                    return

    async def _outcome(self, process: asyncio.subprocess.Process, asked: Completion | StepAsked) -> Any:
        """Read the answers to one call. A turn that is played again is answered too, so that each has its time."""
        new = len(asked.drawn) - asked.answered if isinstance(asked, StepAsked) else 0
        observed: list[Observed] = []
        while not observed or (len(observed) < new and not observed[-1].done):
            outcome = await self._answer(process, self._timeout_s)
            if outcome.fault:
                return Unscored(reason=outcome.fault)
            if outcome.score is not None:
                return outcome.score
            observed += [outcome.observed] if outcome.observed is not None else []
        return tuple(observed)

    async def _answer(self, process: asyncio.subprocess.Process, limit_s: float) -> Outcome:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                return msgspec.msgpack.decode(await read_frame(process.stdout, OUTCOME_BYTES), type=Outcome)
        except BaseException as error:
            # If this was cancelled, its answers would be taken for answers to the next call.
            await self._kill()
            if isinstance(error, TimeoutError):
                raise _Lost(f"it took longer than {limit_s:g} s") from error
            if isinstance(error, OSError | EOFError | msgspec.DecodeError):
                raise _Lost("") from error
            raise

    async def begin(self) -> asyncio.subprocess.Process:
        """A process that has loaded the task. _Broken if there can be none."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._kill()
        if self._closed.is_set():
            raise _Broken(CLOSED)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "swarm.tasks.reward_child",
            *self._arguments,
            env={**SET, **clean_environment(os.environ)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        self._process = process
        self._listening = asyncio.create_task(self._listen(process.stderr))
        if self._closed.is_set():
            # `close` was called before this process could be seen.
            await self._kill()
            raise _Broken(CLOSED)
        process.stdin.write(framed(msgspec.msgpack.encode(self._begin)))
        try:
            fault = (await self._answer(process, START_S)).fault
        except _Lost as lost:
            fault = str(lost) or self._end
        if fault:
            await self._kill()
            raise _Broken(f"a reward process cannot load the task {self._begin.task.name!r}: {fault}")
        return process

    async def close(self) -> None:
        self._closed.set()
        await self._kill()

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        """Keep the end of what the process prints. A pipe that nobody reads would block it."""
        self._printed.clear()
        while said := await stderr.read(SAID_BYTES):
            self._heard(said)
            self._printed += said
            del self._printed[:-SAID_BYTES]

    @property
    def _end(self) -> str:
        lines = [line.strip() for line in self._printed.decode(errors="replace").split("\n") if line.strip()]
        how = f"was killed ({signal.Signals(-self._status).name})" if self._status < 0 else f"exited ({self._status})"
        return f"its process {how}: {lines[-1][-200:] if lines else 'it said nothing'}"

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._status = await process.wait()
        if self._listening is not None:
            # Its last words may still be on their way.
            await asyncio.wait({self._listening}, timeout=LAST_WORDS_S)
            self._listening.cancel()


def module_path() -> tuple[str, ...]:
    """Where this process looks for modules, and its working directory, where the user's own are."""
    return tuple(dict.fromkeys([*map(os.path.abspath, sys.path), os.getcwd()]))
