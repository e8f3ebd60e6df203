"""The trial at join: how many samples fit side by side, and how fast this engine draws with all its places filled.

Places, for an engine without a pager of its own: a sample holds keys and values of every token for every layer, and the
probabilities of one token while it is drawn. Free bytes are those beside the weights.

Speed does not depend on the weights, so prompts are random and any weights do. Rounds grow from a few tokens a sample
to MAX_TOKENS, each as long as the time left allows, so a slow machine gets a figure too, of short samples. The first
round counts only if it is the only one: libraries compile and allocate in it. A round is never cancelled, which would
cost the engine; its jobs end by their own time limit, and the tokens drawn until then count.

The result is kept in the node's state directory: a device, engine and model are tried out once.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

from swarm.broadcast.coding import in_thread
from swarm.broadcast.store.disk import DiskFull, replace_file
from swarm.broadcast.version.manifest import Layout
from swarm.errors import UserError
from swarm.net.wire import digest, encode
from swarm.sampler.engine import Generate, Generated, Job, Started
from swarm.types import SamplingRules

CPU_SHARE = 0.5  # Of the memory that is available on a machine without a GPU: its owner wants to go on working

DRAW_COPIES = 8
"""Float32 rows over the vocabulary that one draw holds at most: logits as they come and as float32, scaled, noise, its
logarithm, their difference, the choice, and what the softmax takes."""

ASSUMED_CONTEXT = 4096  # Of a model whose configuration states none

ASSUMED_SAMPLE_TOKENS = 4096
"""Prompt and completion of a sample for which no limit was set: contexts of 40,000 tokens and more are seldom used, and
an engine that reserved them would draw one sample at a time."""

# What open models call their shape, and the table of their tokens; GPT-2, Bloom and MPT have names of their own.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides the memory of a sample. `context_tokens` bounds prompt and completion together."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int

    def sample_bytes(self, tokens: int, dtype_bytes: int) -> int:
        """Memory of one sample of `tokens`. Layers with a window are counted as if they had none."""
        cached = 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes * tokens
        return cached + DRAW_COPIES * 4 * self.vocab_size


def shape_of(layout: Layout) -> ModelShape:
    """The shape that the config.json of a layout states; UserError if it states no layers or no width. A model without
    heads is counted as if it cached its whole width for each token, which is more than any state takes."""
    config = _config(layout)
    # Rows of the embedding are what a token may be, whatever the tokenizer knows of.
    rows = [tensor.shape[0] for tensor in layout.tensors if EMBEDDINGS.search(tensor.name) and len(tensor.shape) == 2]
    try:
        layers, hidden = (_stated(config, names) for names in (LAYERS, HIDDEN))
        heads = _stated(config, HEADS, default=1)
        context = _stated(config, CONTEXT, default=ASSUMED_CONTEXT)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the swarm's model states no {error} in its config.json: this engine cannot tell how many samples fit; "
            "the learner has to publish a model with layers of one width"
        ) from error
    return ModelShape(
        layers=layers,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab_size=min([*rows, *([int(config["vocab_size"])] if config.get("vocab_size") else [])], default=1),
        context_tokens=context,
    )


def _stated(config: dict[str, Any], names: tuple[str, ...], *, default: int | None = None) -> int:
    """What the configuration calls by one of these names, if it is above 0. KeyError with the usual one."""
    for name in names:
        if config.get(name):
            return int(config[name])
    if default is None:
        raise KeyError(names[0])
    return default


def places_that_fit(
    shape: ModelShape, *, free_bytes: int, share: float, wanted: int, tokens: int, dtype_bytes: int
) -> int:
    """Samples of `tokens` tokens (at most the context) that fit in a share of the free bytes, at most `wanted`.

    At least one, since most samples are shorter than they may be."""
    one_bytes = shape.sample_bytes(min(tokens, shape.context_tokens), dtype_bytes)
    return max(1, min(wanted, int(free_bytes * share) // one_bytes))


def _config(layout: Layout) -> dict[str, Any]:
    """config.json; of a model with several parts, the text's."""
    for file in layout.files:
        if file.name == "config.json":
            try:
                config = msgspec.json.decode(file.content, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise UserError(f"the config.json of the swarm's model cannot be read: {error}") from error
            text = config.get("text_config")
            return text if isinstance(text, dict) else config
    raise UserError("the swarm's model has no config.json: the learner has to publish one")


LIMIT_S = 30.0  # Longest trial. Weights take longer to come than this wherever speed matters.
PROMPT_TOKENS = 64
MAX_TOKENS = 64  # New tokens of a sample in the longest rounds: enough that the prompt is a small part of the time
FIRST_TOKENS = 4
GROWTH = 4
"""4, then 4 that count, 16, 64, 64: a machine that draws one token a second and sample still ends the second round."""

WHOLE_ROUNDS = 2  # Rounds of the most tokens; their mean is the figure
ENTRIES = 32  # Trials kept: a machine has a few devices and its node meets a few models
CACHE_BYTES = 64 * 1024  # ENTRIES of under 1 KiB. A larger file is not ours.

ASSUMED_TOKENS = 1024.0
"""Mean length of a completion until the first batch: between short answers and long reasoning (2,000 and more)."""

Draw = Callable[[Generate], Coroutine[Any, Any, Generated]]  # A call to the engine


class Trial(msgspec.Struct, frozen=True):
    """The engine drew `tokens_per_s` in all with `places` samples side by side; it took `seconds` to find out."""

    tokens_per_s: Annotated[float, msgspec.Meta(ge=0)]
    places: Annotated[int, msgspec.Meta(ge=1)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Each of `places` was to draw `tokens`; they drew `drawn` together, in `seconds`."""

    places: int
    tokens: int
    drawn: int
    seconds: float

    @property
    def was_cut_off(self) -> bool:
        return self.drawn < self.tokens * self.places


class TrialCache:
    """Former trials of this node, in one file that is replaced whole; one that cannot be read is empty. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> Trial | None:
        return self._read().get(key)

    def put(self, key: str, trial: Trial) -> None:
        """Keep a trial; the oldest of more than ENTRIES goes. On a full disk it is not kept, but made again."""
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
    context_tokens: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Trial:
    """How fast the engine that `started` describes draws, from the cache or by trying, for `limit_s` (and the token
    under way). `context_tokens` is the engine's own limit, where it is below the model's.

    A rate of 0 means that nothing was drawn in time; it is not kept. Raises what a call of the engine raises.
    """
    key = cache_key(started, layout)
    if (known := await in_thread(cache.get, key)) is not None:
        return known
    shape = shape_of(layout)
    context = min(shape.context_tokens, context_tokens or shape.context_tokens)
    prompt_tokens, most_tokens = lengths_in(context)
    rounds: list[Round] = []
    began = clock()
    while tokens := next_tokens(rounds, most_tokens, limit_s - (clock() - began)):
        left_s = limit_s - (clock() - began)
        calls = calls_of(started, shape, len(rounds), prompt_tokens, tokens, left_s)
        since = clock()
        drawn = await _drawn(engine, calls)
        rounds.append(Round(places=started.places, tokens=tokens, drawn=drawn, seconds=clock() - since))
    trial = Trial(tokens_per_s=rate_of(rounds), places=started.places, seconds=clock() - began)
    if trial.tokens_per_s > 0:
        await in_thread(cache.put, key, trial)
    return trial


def rollouts_per_s(trial: Trial, mean_tokens: float) -> float:
    """Completions of that mean length per second with all places filled; for an engine in lockstep, of the mean of each
    batch's longest."""
    return trial.tokens_per_s / max(1.0, mean_tokens)


def assumed_mean_tokens(context_tokens: int) -> float:
    """Mean length to go by until completions were seen: half of a short context is more than any task uses."""
    return min(ASSUMED_TOKENS, context_tokens / 2)


def cache_key(started: Started, layout: Layout) -> str:
    """What a trial's figure depends on, to be read: device, engine, libraries, places, model without weights."""
    config = next((file.content for file in layout.files if file.name == "config.json"), b"")
    model = digest(encode((layout.tensors, config))).hex()[:32]
    where = f"{started.device_name or 'a processor'} ({started.device}, {started.dtype})"
    how = f"{started.engine} [{started.versions}] with {started.places} places"
    return f"{how[:300]} on {where[:200]}, model {model}"


def lengths_in(context_tokens: int) -> tuple[int, int]:
    """Tokens of a prompt and most new ones of a sample that fit in a context."""
    prompt = max(1, min(PROMPT_TOKENS, context_tokens // 2))
    return prompt, max(1, min(MAX_TOKENS, context_tokens - prompt))


def next_tokens(rounds: Sequence[Round], most_tokens: int, left_s: float) -> int:
    """New tokens of each sample in the next round, 0 if enough was measured or no longer round ends in time."""
    if left_s <= 0 or sum(one.tokens == most_tokens for one in rounds[1:]) >= WHOLE_ROUNDS:
        return 0
    if rounds and rounds[-1].was_cut_off:
        return 0
    if len(rounds) < 2:
        # What was compiled in the first round says nothing of how long the next one takes.
        return min(FIRST_TOKENS, most_tokens)
    last = rounds[-1]
    in_time = MAX_TOKENS if last.seconds <= 0 else int(last.tokens * min(left_s / last.seconds, float(MAX_TOKENS)))
    tokens = min(most_tokens, last.tokens * GROWTH, in_time)
    return tokens if tokens >= last.tokens else 0


def rate_of(rounds: Sequence[Round]) -> float:
    """Tokens per second of the longest rounds together; the first counts only where it is alone."""
    counted = [one for one in (rounds[1:] or rounds) if one.drawn > 0 and one.seconds > 0] or list(rounds[:1])
    longest = max((one.tokens for one in counted), default=0)
    chosen = [one for one in counted if one.tokens == longest]
    seconds = sum(one.seconds for one in chosen)
    return sum(one.drawn for one in chosen) / seconds if seconds > 0 else 0.0


def calls_of(
    started: Started, shape: ModelShape, number: int, prompt_tokens: int, tokens: int, time_limit_s: float
) -> list[Generate]:
    """The calls of one round: one of all places for an engine in lockstep, else one of each. Prompts are random and new
    in each round, so that no cache of prefixes helps."""
    random = Random(f"trial {number}")
    rules = SamplingRules(temperature=1.0, max_new_tokens=tokens, stop_token_ids=())
    jobs = [
        Job(
            prompt_token_ids=tuple(random.randrange(shape.vocab_size) for _ in range(prompt_tokens)),
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
    """Tokens that one call drew: those of whole samples, and of each that was cut off as many as the longest had."""
    cut_off = min(generated.steps, call.jobs[0].rules.max_new_tokens)
    return sum(len(one.token_ids) // 4 or cut_off for one in generated.samples)
