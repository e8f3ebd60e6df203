"""Tasks whose episodes a program plays in a child process of the learner: `agent:FILE.py:FUNCTION`, a function of the
user's, and `verifiers:MODULE`, a taskset of verifiers 0.4 with the library's own environment server.

The process knows the answers, and of the node's secrets only a key for each episode that it plays: the endpoint takes
nothing else from it. An agent's reaches nothing but the endpoint, unless `network` among the task's options says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from swarm.environments.base import Environment, Messages, Step
from swarm.errors import ChildFailed, UserError
from swarm.extras import how_to_have
from swarm.process import Child, clean_environment
from swarm.tasks.base import SEAT, EpisodeResult, Task, TaskOptions
from swarm.tasks.functions import check_function
from swarm.tasks.hub import hub_task
from swarm.tasks.questions import WHOLE_ROW, jsonl_task
from swarm.types import MAX_TURNS, Prompt, Score

ELSEWHERE = "it is played by a process of its own, through the learner's endpoint alone"
HANG_S = 60.0  # The process reports every second that its event loop turns
KINDS = {"jsonl": jsonl_task, "hf": hub_task}
POLICY = "policy"  # The model's name at the endpoint


class ProgramBegin(msgspec.Struct, frozen=True, kw_only=True):
    """What to play: `what` is FILE.py:FUNCTION or a module. The endpoint is at `url`, and at `socket` for a process
    without a `network`, from which the files `secrets` are hidden too. With `has_data` each prompt has a row."""

    what: str
    url: str
    socket: str = ""
    secrets: tuple[str, ...] = ()
    network: bool = False
    has_data: bool = False
    sampling: dict[str, float] = {}


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Play the prompt `prompt_id`, whose row of data is `row`, with this `key` of the endpoint. An empty prompt only
    checks that the program has loaded."""

    prompt_id: str
    row: str = ""
    key: str = ""


class ProgramTask(Task, Environment):
    """Its prompts only name what is played: rows of `data`, or numbers of which the program makes its own. It is its
    own environment, which ExternalEpisodes plays."""

    max_new_tokens = None
    max_turns = MAX_TURNS
    seats = SEAT + 1
    is_external = True
    chat = True

    def __init__(self, options: TaskOptions, description: str, data: Task | None = None) -> None:
        self.name, self.description, self.player, self._data = options.name, description, self, data

    @property
    def size(self) -> int | None:
        return self._data.size if self._data is not None else None

    @property
    def data_digest(self) -> str:
        return self._data.data_digest if self._data is not None else ""

    def prompt(self, index: int) -> Prompt:
        return _named(self._data.prompt(index)) if self._data is not None else _number("train", index)

    def held_out(self, count: int) -> Sequence[Prompt]:
        if self._data is not None:
            return [_named(prompt) for prompt in self._data.held_out(count)]
        return [_number("heldout", i) for i in range(count)]

    def environment(self) -> Environment:
        return self

    def score(self, prompt: Prompt, completion: str) -> Score:
        raise UserError(f"{self.name}: {ELSEWHERE}")

    def reset(self, seed: int) -> Messages:
        raise UserError(f"{self.name}: {ELSEWHERE}")

    def step(self, text: str) -> Step:
        raise UserError(f"{self.name}: {ELSEWHERE}")


def _named(prompt: Prompt) -> Prompt:
    return msgspec.structs.replace(prompt, text=f"row {prompt.prompt_id}", answer="")


def _number(side: str, number: int) -> Prompt:
    return Prompt(prompt_id=f"{side}-{number}", text=f"{side} {number}", answer="")


def verifiers_task(options: TaskOptions, module: str) -> Task:
    _check_package(options, "verifiers", "verifiers")
    return ProgramTask(options, f"the taskset {module} of verifiers")


def agent_task(options: TaskOptions, rest: str) -> Task:
    """FILE.py:FUNCTION, which makes its own rows, or FILE.py:FUNCTION@KIND:DATA."""
    function, _, named = rest.partition("@")
    check_function(function)
    _check_package(options, "openai", "agents")
    if unknown := sorted(options.task_options.keys() - {"network"}):
        raise UserError(f"{options.name} has no option {unknown[0]}: the only one is network = true")
    if not named:
        return ProgramTask(options, f"the agent {function}")
    kind, _, path = named.partition(":")
    if kind not in KINDS:
        raise UserError(f"{options.name}: data is {' or '.join(f'{one}:NAME' for one in KINDS)}, not {named}")
    data = KINDS[kind](msgspec.structs.replace(options, columns=WHOLE_ROW, rewards={}), path)
    return ProgramTask(options, f"the agent {function} on {data.description}", data)


def _check_package(options: TaskOptions, package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise UserError(f"{options.name} needs the extra `{extra}`: {how_to_have(extra)}")


class ProgramRuns:
    """Has the child process `module` play episodes, and starts it when it is needed. `key_of` gives the endpoint's key
    for an episode."""

    def __init__(self, module: str, begin: ProgramBegin, key_of: Callable[[str], str], log: Path) -> None:
        self._module, self._key_of, self._log = module, key_of, log
        self._begin = msgspec.json.encode(begin).decode()
        self._starting = asyncio.Lock()
        self._child: Child | None = None
        self._closed = False

    async def begin(self) -> str:
        """Have the process load the program, before any sampler comes. Return a line for the user, or "". Raise
        UserError if it cannot."""
        try:
            return (await (await self._started()).call(Play(prompt_id=""), EpisodeResult)).fault
        except ChildFailed as error:
            raise UserError(f"what plays the episodes cannot be loaded: {error}") from error

    async def run(self, episode: str, prompt: Prompt) -> EpisodeResult:
        """Play one episode; this is what ExternalEpisodes calls. Raise ChildFailed if the process ends or does not
        start."""
        child = await self._started()
        try:
            call = Play(prompt_id=prompt.prompt_id, row=prompt.row, key=self._key_of(episode))
            return await child.call(call, EpisodeResult)
        except ChildFailed:
            if self._closed:
                raise asyncio.CancelledError from None  # We ended it ourselves, so nothing failed
            if self._child is child:
                await self._end()
            raise

    async def _started(self) -> Child:
        async with self._starting:
            if self._child is None:
                log, clean = self._log, clean_environment
                child = Child("agent process", self._module, self._begin, log=log, hang_s=HANG_S, environment=clean)
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
