"""`verifiers:MODULE`: tasksets of verifiers 0.4, played by its own environment server in a child process of the
learner.

This process knows the answers of the tasks, and of the node's secrets only the endpoint's token. Its socket is in a
directory that other users cannot enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import ChildFailed, UserError
from swarm.extras import how_to_have
from swarm.process import Child, clean_environment
from swarm.tasks.base import SEAT, EpisodeResult, Task, TaskOptions
from swarm.types import MAX_TURNS, Prompt, Score

ELSEWHERE = "a taskset of verifiers is played by its own process, through the learner's endpoint alone"
HANG_S = 60.0  # The process reports every second that it is alive


class TasksetBegin(msgspec.Struct, frozen=True, kw_only=True):
    """Which taskset to play, with the model's `files` and the endpoint's `url`. If `began` is set, messages are put
    into the model's chat template, with that time, `arguments` and the `system_prompt`."""

    module: str
    files: str
    url: str
    sampling: dict[str, float]
    stop_token_ids: tuple[int, ...]
    began: datetime | None = None
    arguments: dict[str, Any] = {}
    system_prompt: str | None = None


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Play the task `prompt_id`. An empty one only checks that the taskset has loaded."""

    prompt_id: str
    headers: dict[str, str]


class VerifiersTask(Task, Environment):
    """Its prompts are only names: the child process has the questions. It is its own environment, which
    ExternalEpisodes plays."""

    max_new_tokens = None
    max_turns = MAX_TURNS
    seats = SEAT + 1
    is_external = True
    chat = True

    def __init__(self, options: TaskOptions, module: str) -> None:
        if find_spec("verifiers") is None:
            raise UserError(f"{options.name} needs the extra `verifiers`: {how_to_have('verifiers')}")
        self.name, self.description, self.player = options.name, f"the taskset {module} of verifiers", self

    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"train-{index}", text=f"task {index}", answer="")

    def held_out(self, count: int) -> Sequence[Prompt]:
        return [Prompt(prompt_id=f"heldout-{i}", text=f"held out {i}", answer="") for i in range(count)]

    def environment(self) -> Environment:
        return self

    def score(self, prompt: Prompt, completion: str) -> Score:
        raise UserError(ELSEWHERE)

    def reset(self, seed: int) -> Messages:
        raise UserError(ELSEWHERE)

    def step(self, text: str) -> Step:
        raise UserError(ELSEWHERE)


class VerifiersRuns:
    """Has the child process play episodes, and starts it when it is needed. `token` is the endpoint's."""

    def __init__(self, begin: TasksetBegin, token: str, log: Path) -> None:
        self._arguments, self._token, self._log = msgspec.json.encode(begin).decode(), token, log
        self._starting = asyncio.Lock()
        self._child: Child | None = None
        self._closed = False

    async def begin(self) -> None:
        """Have the process load the taskset, before any sampler comes. Raise UserError if it cannot."""
        try:
            await (await self._started()).call(Play(prompt_id="", headers={}), EpisodeResult)
        except ChildFailed as error:
            raise UserError(f"the taskset cannot be played: {error}") from error

    async def run(self, episode: str, prompt_id: str) -> EpisodeResult:
        """Play one episode; this is what ExternalEpisodes calls. Raise ChildFailed if the process ends or does not
        start."""
        child = await self._started()
        headers = {"Authorization": f"Bearer {self._token}", "X-Echo-Episode": episode}
        try:
            return await child.call(Play(prompt_id=prompt_id, headers=headers), EpisodeResult)
        except ChildFailed:
            if self._closed:
                raise asyncio.CancelledError from None  # We ended it ourselves, so nothing failed
            if self._child is child:
                await self._end()
            raise

    async def _started(self) -> Child:
        async with self._starting:
            if self._child is None:
                name, given = "environment server", ("swarm.tasks.verifiers_child", self._arguments)
                child = Child(name, *given, log=self._log, hang_s=HANG_S, environment=clean_environment)
                await child.start()
                self._child = child
            return self._child

    async def close(self) -> None:
        self._closed = True
        await self._end()

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()
