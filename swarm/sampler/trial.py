"""The trial at join: how fast this engine draws with all its places filled.

Speed does not depend on the weights, so the trial uses random prompts and any weights. Rounds grow from 4 tokens a
sample to 64, so a slow machine gets a figure too, from short samples. The first round counts only if it is the only
one, because libraries compile and allocate in it. A round is never cancelled, which would cost the engine; its jobs end
by their own time limit, and the tokens drawn until then count.

The result is kept in the node's state directory: each device, engine and model is tried out once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

from swarm.broadcast.coding import in_thread
from swarm.broadcast.store.disk import DiskFull, replace_file
from swarm.broadcast.version.manifest import Layout
from swarm.net.wire import digest, encode
from swarm.sampler.engine import Generate, Generated, Job, Started
from swarm.types import SamplingRules

ASSUMED_CONTEXT = 4096  # For a model whose configuration states none
LIMIT_S = 30.0  # Longest trial. Weights take longer to arrive than this wherever speed matters.
PROMPT_TOKENS = 64
MAX_TOKENS = 64  # New tokens of a sample in the longest rounds: enough that the prompt takes a small part of the time
ROUNDS = (4, 4, 16, MAX_TOKENS, MAX_TOKENS)
"""Even at one token a second per sample, the second one, the first to count, ends"""

ENTRIES = 32  # Trials kept: a machine has a few devices, and its node meets a few models
CACHE_BYTES = 64 * 1024  # ENTRIES of under 1 KiB. A larger file is not ours.
ASSUMED_TOKENS = 1024.0  # Mean completion until the first batch: between short answers and long reasoning (over 2,000)

Draw = Callable[[Generate], Coroutine[Any, Any, Generated]]  # Calls the engine


class Trial(msgspec.Struct, frozen=True):
    """The engine drew `tokens_per_s` in total with `places` samples side by side; the trial took `seconds`."""

    tokens_per_s: Annotated[float, msgspec.Meta(ge=0)]
    places: Annotated[int, msgspec.Meta(ge=1)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class TrialCache:
    """Former trials of this node, in one file that is replaced whole; an unreadable one counts as empty. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> Trial | None:
        return self._read().get(key)

    def put(self, key: str, trial: Trial) -> None:
        """Keep a trial; drop the oldest beyond ENTRIES. If the disk is full, it will be made again."""
        trials = self._read()
        trials.pop(key, None)
        trials[key] = trial
        newest = dict(list(trials.items())[-ENTRIES:])
        try:
            replace_file(self._path, msgspec.json.format(msgspec.json.encode(newest)))
        except DiskFull:
            return

    def _read(self) -> dict[str, Trial]:
        try:
            with self._path.open("rb") as file:
                trials = msgspec.json.decode(file.read(CACHE_BYTES), type=dict[str, Trial])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return {key: trial for key, trial in trials.items() if math.isfinite(trial.tokens_per_s)}


async def try_out(
    engine: Draw,
    started: Started,
    layout: Layout,
    cache: TrialCache,
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Trial:
    """Return how fast the engine that `started` describes draws, from the cache or by trying for `limit_s` (and the
    current token). A rate of 0 means that nothing was drawn in time; it is not kept. Faults of the engine's calls pass
    through."""
    key = cache_key(started, layout)
    if (known := await in_thread(cache.get, key)) is not None:
        return known
    prompt_tokens, most_tokens = lengths_in(started.context_tokens or ASSUMED_CONTEXT)
    rounds: list[tuple[int, float]] = []
    began = clock()
    for number, tokens in enumerate(ROUNDS):
        since = clock()
        if (left_s := began + limit_s - since) <= 0:
            break
        drawn = await _drawn(engine, calls_of(started, number, prompt_tokens, min(tokens, most_tokens), left_s))
        rounds.append((drawn, clock() - since))
    trial = Trial(tokens_per_s=rate_of(rounds), places=started.places, seconds=clock() - began)
    if trial.tokens_per_s > 0:
        await in_thread(cache.put, key, trial)
    return trial


def assumed_rollouts_per_s(trial: Trial, context_tokens: int) -> float:
    """Return the completions per second with all places filled, until some are seen. No task uses more than half of a
    short context."""
    return trial.tokens_per_s / min(ASSUMED_TOKENS, (context_tokens or ASSUMED_CONTEXT) / 2)


def cache_key(started: Started, layout: Layout) -> str:
    """Return what a trial's figure depends on, readable: device, engine, libraries, places, model without weights."""
    config = next((file.content for file in layout.files if file.name == "config.json"), b"")
    model = digest(encode((layout.tensors, config))).hex()[:32]
    where = f"{started.device_name or 'a processor'} ({started.device}, {started.dtype})"
    how = f"{started.engine} [{started.versions}] with {started.places} places"
    return f"{how[:300]} on {where[:200]}, model {model}"


def lengths_in(context_tokens: int) -> tuple[int, int]:
    """Return the tokens of a prompt and the most new tokens of a sample that fit in a context."""
    prompt = max(1, min(PROMPT_TOKENS, context_tokens // 2))
    return prompt, max(1, min(MAX_TOKENS, context_tokens - prompt))


def rate_of(rounds: Sequence[tuple[int, float]]) -> float:
    """Return the tokens per second of those rounds, each (tokens drawn, seconds), that drew at least half as many
    tokens as the largest. The first round counts only if no other drew any."""
    counted = rounds[1:] if any(drawn for drawn, _ in rounds[1:]) else rounds[:1]
    most = max((drawn for drawn, _ in counted), default=0)
    chosen = [(drawn, seconds) for drawn, seconds in counted if 2 * drawn >= most]
    seconds = sum(seconds for _, seconds in chosen)
    return sum(drawn for drawn, _ in chosen) / seconds if seconds > 0 else 0.0


def calls_of(started: Started, number: int, prompt_tokens: int, tokens: int, time_limit_s: float) -> list[Generate]:
    """Return the calls of one round: one call for all places of a lockstep engine, else one per place. Prompts are
    random and new in each round, so that no prefix cache helps."""
    random = Random(f"trial {number}")
    rules = SamplingRules(temperature=1.0, max_new_tokens=tokens, stop_token_ids=())
    jobs = [
        Job(
            prompt_token_ids=tuple(random.randrange(started.vocab_size) for _ in range(prompt_tokens)),
            seed=random.getrandbits(32),
            rules=rules,
            time_limit_s=time_limit_s,
        )
        for _ in range(started.places)
    ]
    if started.lockstep:
        return [Generate(jobs=tuple(jobs), trial=True)]
    return [Generate(jobs=(job,), trial=True) for job in jobs]


async def _drawn(engine: Draw, calls: Sequence[Generate]) -> int:
    async with asyncio.TaskGroup() as group:
        under_way = [(call, group.create_task(engine(call))) for call in calls]
    return sum(_tokens_of(call, task.result()) for call, task in under_way)


def _tokens_of(call: Generate, generated: Generated) -> int:
    """Return the tokens that one call drew. A sample that was cut off counts as long as the longest."""
    cut_off = min(generated.steps, call.jobs[0].rules.max_new_tokens)
    return sum(len(one.token_ids) // 4 or cut_off for one in generated.samples)
