"""A model that is not trained, on an engine of this machine: for `eval` and `serve`."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import count
from pathlib import Path

import msgspec

from swarm.errors import EchoError, UserError
from swarm.inference.server import Endpoint, serving
from swarm.learner.messages import FROZEN, SMALL_FILES, WEIGHTS, Frozen
from swarm.rollout.plane.groups import sample_seed
from swarm.run.directory import LOGS
from swarm.run.local import last_words, start_node, stop_nodes
from swarm.run.prompts import open_tokenizer
from swarm.sampler.engine import EngineKind, EngineOptions, Job, Sampled
from swarm.sampler.worker import EngineWorker
from swarm.settings import LeadConfig
from swarm.tasks.chat import load_chat_template
from swarm.tasks.programs import POLICY
from swarm.tasks.turns import TurnText
from swarm.types import MAX_TOKENS, GroupId, Rollout, SamplingRules, VersionId

SAMPLE_S = 1e6  # For one answer: nobody waits for the machine, and an engine that stands still is noticed
GATHER_S = 0.02  # Before a batch: who was answered just now mostly asks again at once


async def lay_out(config: LeadConfig, directory: Path) -> Frozen:
    """Have a process of its own load the model, whose libraries are gone with it."""
    log = directory / LOGS / "model.log"
    log.parent.mkdir()
    words = (config.model, str(config.seed), str(directory))
    child = await start_node(log, *words, module="swarm.learner.frozen")
    try:
        if await child.wait():
            raise UserError(last_words(log).partition(" (log: ")[0])
    finally:
        await stop_nodes([child])
    return msgspec.msgpack.decode((directory / FROZEN).read_bytes(), type=Frozen)


class Drawing:
    """Has one engine draw for all who ask: side by side, or in batches."""

    def __init__(self, engine: EngineWorker, seed: int) -> None:
        self._engine, self._seed, self._numbers = engine, seed, count()
        self._places = asyncio.Semaphore(engine.places)
        self._waiting: deque[tuple[Job, asyncio.Future[Sampled]]] = deque()
        self._batching: asyncio.Task[None] | None = None

    async def ask(self, token_ids: Sequence[int], rules: SamplingRules) -> Rollout:
        """Draw with another seed each time. This is what an Endpoint calls."""
        group = GroupId(f"q{next(self._numbers)}")
        one = await self.draw(Job(tuple(token_ids), sample_seed(self._seed, group, 0), rules, SAMPLE_S))
        return Rollout(group, 0, one.token_ids, one.logprobs, one.spans, one.finish)

    async def draw(self, job: Job) -> Sampled:
        """Raise EchoError if the engine does not draw it."""
        if self._engine.lockstep:
            answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
            self._waiting.append((job, answer))
            if self._batching is None or self._batching.done():
                self._batching = asyncio.create_task(self._batches())
            one = await answer
        else:
            async with self._places:
                (one,) = (await self._engine.generate([job])).samples
        if one.fault:
            raise EchoError(f"the engine drew no answer: {one.fault}")
        return one

    async def _batches(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._engine.places))]
            try:
                drawn = (await self._engine.generate([job for job, _ in batch])).samples
            except EchoError as fault:
                for _, answer in batch:
                    if not answer.cancelled():
                        answer.set_exception(fault)
                continue
            for (_, answer), one in zip(batch, drawn, strict=True):
                if not answer.cancelled():
                    answer.set_result(one)


@asynccontextmanager
async def drawing(
    frozen: Frozen, directory: Path, kind: EngineKind, options: EngineOptions, seed: int, say: Callable[[str], None]
) -> AsyncIterator[Drawing]:
    """Have an engine hold what `lay_out` wrote, while the block runs."""
    engine = EngineWorker(directory, kind=kind, options=options)
    try:
        await engine.launch()
        started = await engine.load(frozen.layout)
        say(f"engine: {started.engine} on {started.device} in {started.dtype}")
        version = VersionId(incarnation=0, version=0)
        if refused := await engine.install(version, frozen.tensor_sums, directory / WEIGHTS):
            raise EchoError(f"the engine does not hold the model: {refused.why}")
        yield Drawing(engine, seed)
    finally:
        await engine.stop()


async def serve(
    config: LeadConfig,
    kind: EngineKind,
    options: EngineOptions,
    say: Callable[[str], None],
    loaded: Callable[[], None] = lambda: None,
    *,
    port: int = 0,
    address: Path | None = None,
) -> None:
    """Answer at OpenAI's endpoint until cancelled. Where it is and its token are noted in the directory `address`."""
    with tempfile.TemporaryDirectory(prefix="echo-node-") as made:
        directory = Path(made)
        frozen = await lay_out(config, directory)
        loaded()
        files, stops = directory / SMALL_FILES, frozen.stop_token_ids
        template = load_chat_template(files, began=datetime.now(), arguments=config.chat_arguments)
        text = TurnText(open_tokenizer(config.model, files), template, stops, config.system_prompt)
        most = config.max_new_tokens or min(frozen.context_tokens, MAX_TOKENS)
        rules = SamplingRules(config.temperature, most, stop_token_ids=stops, stop=config.stop)
        async with drawing(frozen, directory, kind, options, config.seed, say) as engine:
            endpoint = Endpoint(engine.ask, text, rules, context=frozen.context_tokens, model=config.model)
            async with serving(endpoint, address or directory, port) as place:
                say(f"base_url {place.url}/v1  api_key {endpoint.token}  model {POLICY}")
                await asyncio.Event().wait()
