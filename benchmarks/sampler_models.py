"""Random models for the sampler's benchmark, and the versions of one as learner and receiver hold them on disk.

Models with the vocabulary of Qwen3 and one of its sizes have its shape too; others are wider and have fewer layers.
Weights are N(0, INITIAL_STD) in float32 and published as bf16. They are wide enough that log-probs differ between
tokens and between versions; nothing else of a model that was trained matters to the figures.
"""

from __future__ import annotations

import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from swarm.broadcast.coding import coding_pool
from swarm.broadcast.encoding import by_threads
from swarm.broadcast.publishing import PublishedVersions
from swarm.broadcast.store.store import VersionStore
from swarm.broadcast.store.weight_map import WeightMap
from swarm.broadcast.version.manifest import Layout
from swarm.learner.checkpoint.model_files import layout_of, save_small_files, stream_tensors, write_staging
from swarm.learner.tiny import tiny_tokenizer
from swarm.net.signing import SigningKey
from swarm.sampler.engine import Install
from swarm.types import VersionId
from swarm.wire import encode

Architecture = Literal["qwen3", "llama"]

HEAD_DIM = 64
KV_SHARE = 2
"""Query heads for each key-value head."""

INTERMEDIATE = 3
"""Width of a feed-forward layer in hidden sizes."""

INITIAL_STD = 0.05

REAL_VOCABULARY = 151_936
"""Rows of Qwen3's embedding: of a model of half a billion parameters a quarter."""

QWEN3 = {6e8: (1024, 3072, 28, 16), 1.7e9: (2048, 6144, 28, 16), 4e9: (2560, 9728, 36, 32)}
"""Width, width of a feed-forward layer, layers and query heads, by parameters; of head_dim 128, with 8 key-value heads,
embeddings tied."""

CHUNK_BYTES = 256 * 1024

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
    if size.vocab_size == REAL_VOCABULARY and size.parameters in QWEN3 and tied:
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
    """Log-probs as engines give them."""
    return array("f", content).tolist()


def ints(content: bytes) -> list[int]:
    """Token ids as engines give them."""
    return array("i", content).tolist()


@dataclass(slots=True, kw_only=True)
class Versions:
    """The versions of a model: published on a learner's disk, handed to a receiver's, applied to its weight map."""

    model: Any
    layout: Layout
    files_dir: Path
    staging: Path
    published: PublishedVersions
    store: VersionStore
    weights: WeightMap
    pool: ThreadPoolExecutor = field(default_factory=coding_pool)
    number: int = -1
    apply_s: float = 0.0
    sent_share: float = 0.0
    """Bytes of the newest version as it was sent, of those of the weights."""

    @classmethod
    def of(cls, model: Any, directory: Path) -> Versions:
        """The model's small files under `directory`; nothing is published yet."""
        directory.mkdir(parents=True, exist_ok=True)
        layout = layout_of(stream_tensors(model), save_small_files(model, tiny_tokenizer(), directory / "model"))
        store = VersionStore(directory / "received", KEY.public_bytes)
        store.set_layout(encode(layout), layout)
        return cls(
            model=model,
            layout=layout,
            files_dir=directory / "model",
            staging=directory / "staging.bin",
            published=PublishedVersions(directory / "published", KEY, layout),
            store=store,
            weights=WeightMap(store.directory, layout, KEY.public_bytes),
        )

    def publish(self) -> Install:
        """Make the next version of what the model is now, apply it to the map, and say how an engine installs it."""
        self.number += 1
        write_staging(stream_tensors(self.model), self.staging)
        version = VersionId(incarnation=0, version=self.number)
        made = self.published.publish(self.staging, version, CHUNK_BYTES, by_threads(self.pool))
        held = self.store.begin(made)
        for index in range(len(held.chunks.spans)):
            if not held.chunks.has(index):
                assert held.chunks.put(index, made.chunks.chunk(index))
        began = time.perf_counter()
        self.weights.apply(held, self.pool)
        self.apply_s = time.perf_counter() - began
        self.sent_share = made.table.encoded_bytes / self.layout.total_bytes
        return Install(version=version, path=str(self.weights.path), tensor_sums=made.table.tensor_sums)

    def close(self) -> None:
        self.weights.close()
        self.published.weights.close()
        self.pool.shutdown()
