"""Random models, their versions as learner and receiver hold them on disk, and an engine's process without a node.

Models with the vocabulary of Qwen3 and one of its sizes have its shape too; others are wider and have fewer layers.
Weights are N(0, INITIAL_STD) in float32 and published as bf16. They are wide enough that log-probs differ between
tokens and between versions; nothing else of a model that was trained matters to the figures.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from swarm.broadcast.coding import coding_pool
from swarm.broadcast.encoding import by_threads
from swarm.broadcast.publishing import PublishedVersions
from swarm.broadcast.store.store import VersionStore
from swarm.broadcast.store.weight_map import WeightMap
from swarm.learner.checkpoint.model_files import layout_of, save_small_files, stream_tensors, write_staging
from swarm.learner.tiny import tiny_tokenizer
from swarm.net.signing import SigningKey
from swarm.process import Child
from swarm.sampler import engine as protocol
from swarm.sampler.engine import EngineDtype, EngineKind, Generate, Install, Installed, Job, Started
from swarm.types import SamplingRules, VersionId
from swarm.wire import encode

Architecture = Literal["qwen3", "llama"]

HEAD_DIM = 64
KV_SHARE = 2  # Query heads for each key-value head
INTERMEDIATE = 3  # Width of a feed-forward layer in hidden sizes
INITIAL_STD = 0.05
REAL_VOCABULARY = 151_936  # Rows of Qwen3's embedding: of a model of half a billion parameters a quarter

QWEN3 = {
    6e8: (1024, 3072, 28, 16),
    1.7e9: (2048, 6144, 28, 16),
    4e9: (2560, 9728, 36, 32),
    8e9: (4096, 12_288, 36, 32),
    14e9: (5120, 17_408, 40, 40),
    32e9: (5120, 25_600, 64, 64),
}
"""Width, width of a feed-forward layer, layers and query heads, by parameters, as in the models' own config.json; of
head_dim 128, with 8 key-value heads. Up to QWEN3_TIED the head is the embedding."""

QWEN3_TIED = 4e9

CHUNK_BYTES = 256 * 1024
WEIGHT_SD = 0.02  # Of masters
NOISE_ITEMS = 1 << 24  # Gradients are cut from so many random numbers at random places
KEY = SigningKey.from_bytes(bytes(range(32)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a model is to be: about how many parameters it has, with a vocabulary and a context of its own."""

    parameters: float
    vocab_size: int = 1024
    context_tokens: int = 256

    def width_and_layers(self, *, tied: bool) -> tuple[int, int]:
        """The hidden size, a multiple of HEAD_DIM heads, and the layers that come nearest to the parameters, with about
        one layer for 64 of width."""
        best = (float("inf"), HEAD_DIM * KV_SHARE, 1)
        for width in range(HEAD_DIM * KV_SHARE, 8193, HEAD_DIM * KV_SHARE):
            embeddings = self.vocab_size * width * (1 if tied else 2)
            layers = max(1, min(round((self.parameters - embeddings) / layer_parameters(width)), width // 32))
            off = abs(embeddings + layers * layer_parameters(width) - self.parameters)
            best = min(best, (off, width, layers))
        return best[1], best[2]


def layer_parameters(width: int) -> int:
    """Of one layer, without its norms: queries and output, keys and values, three feed-forward matrices."""
    return 2 * width * width + 2 * width * width // KV_SHARE + 3 * INTERMEDIATE * width * width


def random_model(
    size: Size, *, architecture: Architecture = "qwen3", tied: bool = True, seed: int = 0, device: str = "cpu"
) -> Any:
    """A float32 model of an architecture, the same for the same seed and kind of device. Drawn on a GPU one of billions
    of parameters is there at once, and after a minute on the CPU."""
    width, layers = size.width_and_layers(tied=tied)
    inner, heads, kv_heads, head_dim = INTERMEDIATE * width, width // HEAD_DIM, width // HEAD_DIM // KV_SHARE, HEAD_DIM
    if size.vocab_size == REAL_VOCABULARY and size.parameters in QWEN3 and tied == (size.parameters <= QWEN3_TIED):
        (width, inner, layers, heads), kv_heads, head_dim = QWEN3[size.parameters], 8, 128
    shape: dict[str, Any] = {
        "vocab_size": size.vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": size.context_tokens,
        "initializer_range": INITIAL_STD,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    # Annotated in part only.
    classes: dict[Architecture, tuple[Any, Any]] = {
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
        "llama": (LlamaForCausalLM, LlamaConfig),
    }
    make, config = classes[architecture]
    with torch.device(device):
        return make(config(**shape))


def parameters_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def step(model: Any, size: float, seed: int) -> None:
    """Move every weight by N(0, size): 1e-6 changes some percent of the bf16 weights, 0.01 the log-probs at sight."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def floats(content: bytes) -> list[float]:
    return array("f", content).tolist()


def ints(content: bytes) -> list[int]:
    return array("i", content).tolist()


class Versions:
    """The versions of a model: published on a learner's disk, handed to a receiver's, applied to its weight map.
    `sent_share`: bytes of the newest version as it was sent, of those of the weights."""

    def __init__(self, model: Any, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.model, self.files_dir = model, directory / "model"
        self.layout = layout_of(stream_tensors(model), save_small_files(model, tiny_tokenizer(), self.files_dir))
        self._staging = directory / "staging.bin"
        self._published = PublishedVersions(directory / "published", KEY, self.layout)
        self._store = VersionStore(directory / "received", KEY.public_bytes)
        self._store.set_layout(encode(self.layout), self.layout)
        self.weights = WeightMap(self._store.directory, self.layout, KEY.public_bytes)
        self._pool = coding_pool()
        self.number, self.apply_s, self.sent_share = -1, 0.0, 0.0

    def publish(self) -> Install:
        """Make the next version of what the model is now, apply it to the map, and say how an engine installs it."""
        self.number += 1
        write_staging(stream_tensors(self.model), self._staging)
        version = VersionId(incarnation=0, version=self.number)
        made = self._published.publish(self._staging, version, CHUNK_BYTES, by_threads(self._pool))
        held = self._store.begin(made)
        for index in range(len(held.chunks.spans)):
            if not held.chunks.has(index):
                assert held.chunks.put(index, made.chunks.chunk(index))
        began = time.perf_counter()
        self.weights.apply(held, self._pool)
        self.apply_s = time.perf_counter() - began
        self.sent_share = made.table.encoded_bytes / self.layout.total_bytes
        return Install(version=version, path=str(self.weights.path), tensor_sums=made.table.tensor_sums)

    def close(self) -> None:
        self.weights.close()
        self._published.weights.close()
        self._pool.shutdown()


class Masters:
    """A float32 model of about `nbytes` in bf16 and its AdamW. Gradients are noise, independent from step to step."""

    def __init__(self, nbytes: int, lr: float, directory: Path) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._noise = torch.randn(NOISE_ITEMS, generator=self._random)
        self._model = random_model(Size(parameters=nbytes / 2), device="meta").to_empty(device="cpu")
        self._model.tie_weights()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(WEIGHT_SD * self._cut(parameter.numel()).view(parameter.shape))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=lr, foreach=False, fused=True)
        self._tensors = stream_tensors(self._model)
        self._staging = directory / "staging.bin"
        files = save_small_files(self._model, tiny_tokenizer(), directory / "files")
        self.layout = layout_of(self._tensors, files)

    def step(self) -> None:
        """Take a step, with one gradient in memory at a time."""
        for parameter in self._model.parameters():
            parameter.grad = self._cut(parameter.numel()).view(parameter.shape)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def stage(self) -> None:
        write_staging(self._tensors, self._staging)

    def memcpy_s(self) -> float:
        held = torch.zeros(self.layout.total_bytes, dtype=torch.uint8)
        copy = torch.zeros_like(held)
        times = []
        for _ in range(3):
            began = time.monotonic()
            copy.copy_(held)
            times.append(time.monotonic() - began)
        return min(times)

    def _cut(self, items: int) -> torch.Tensor:
        """Numbers from a random place of the noise, repeated if there are too few."""
        at = int(torch.randint(NOISE_ITEMS, (1,), generator=self._random))
        if items <= NOISE_ITEMS - at:
            return self._noise[at : at + items].clone()
        return self._noise.roll(-at).repeat(-(-items // NOISE_ITEMS))[:items]


# -- the engine's process --------------------------------------------------------------------------------------------

HANG_S = 300.0  # The first batch of an engine that compiles took half of this on two busy cores
TIME_LIMIT_S = 600.0  # For one sample: more than any of them takes


class EngineBroken(Exception):
    """The engine does not do what is measured of it."""


class EngineProcess:
    """`module KIND`, which is to answer as engine_child does, with its log and files under `directory`."""

    def __init__(self, kind: EngineKind, directory: Path, module: str = "swarm.sampler.engine_child") -> None:
        self.log = directory / "engine.log"
        self.child = Child("engine", module, kind, log=self.log, hang_s=HANG_S)

    async def start(self, versions: Versions, *, places: int, dtype: EngineDtype = "auto") -> Started:
        """Build the model on the CPU; `places` samples at once."""
        context = versions.model.config.max_position_embeddings
        options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "max_model_len": context, "places": places}
        engine = protocol.EngineOptions(**options, hang_s=HANG_S)
        return await self.launch(protocol.Start(str(versions.files_dir), versions.layout, engine))

    async def launch(self, command: protocol.Start) -> Started:
        await self.child.start()
        return await self.child.call(command, Started)

    async def install(self, command: Install) -> Installed:
        """EngineBroken if the engine cannot prove that it holds the version."""
        match await self.child.call(command, Installed | protocol.NotInstalled):
            case Installed() as installed:
                return installed
            case protocol.NotInstalled(why=why):
                raise EngineBroken(f"version {command.version} was not installed: {why}")
        raise AssertionError

    async def draw(self, command: Generate) -> protocol.Generated:
        return await self.child.call(command, protocol.Generated)

    def rss_bytes(self) -> int:
        return int(sum(one.memory_info().rss for one in family_of(self.child.pid)))

    def cpu_s(self) -> float:
        return cpu_seconds(self.child.pid)


@asynccontextmanager
async def running(
    kind: EngineKind, directory: Path, module: str = "swarm.sampler.engine_child"
) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(kind, directory, module)
    try:
        yield engine
    finally:
        await engine.child.stop()


@asynccontextmanager
async def kept_busy(engine: EngineProcess, started: Started, versions: Versions) -> AsyncIterator[None]:
    """All places of an engine that takes on samples one by one draw meanwhile; one in lockstep installs between two
    batches in any case, and stays idle."""
    over = asyncio.Event()
    vocab_size, tokens = versions.model.config.vocab_size, versions.model.config.max_position_embeddings // 2

    async def one_place(seeds: Iterator[int]) -> None:
        while not over.is_set():
            await engine.draw(Generate(jobs=(random_job(next(seeds), vocab_size, prompt_tokens=8, tokens=tokens),)))

    seeds = count()
    async with asyncio.TaskGroup() as group:
        for _ in range(0 if started.lockstep else started.places):
            group.create_task(one_place(seeds))
        try:
            yield
        finally:
            # Calls are awaited to their ends: one that is cancelled kills the engine.
            over.set()


def cpu_seconds(pid: int | None) -> float:
    times = [one.cpu_times() for one in family_of(pid)]
    return float(sum(one.user + one.system for one in times))


def family_of(pid: int | None) -> list[Any]:
    import psutil  # Here, since a machine with a GPU may have what a learner's benchmark needs, and no more

    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def random_job(seed: int, vocab_size: int, *, prompt_tokens: int, tokens: int) -> Job:
    """A sample of a random prompt that ends by its length alone."""
    random = Random(seed)
    return Job(
        prompt_token_ids=tuple(random.randrange(vocab_size) for _ in range(prompt_tokens)),
        seed=seed,
        rules=SamplingRules(temperature=1.0, max_new_tokens=tokens, stop_token_ids=()),
        time_limit_s=TIME_LIMIT_S,
    )
