"""What a learner step of the Qwen3 models takes by the arithmetic of the preflight, on one GPU and on its host.

Part `reckoned` of benchmarks/learner.py. Nothing is measured here and no weights are made: shapes are read from models
on torch's meta device. TOKENS tokens at a time in bf16 with activation checkpointing, no KL, one rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from swarm.learner.adapter import add_matrices, targets_of
from swarm.learner.memory import Setting, kept_on_host, shape_of, step_bytes
from swarm.models.memory import GIB, Shape
from swarm.types import OptimizerStates

TOKENS = 8192
RANKS = (1, 8, 32)  # Of adapters
STATES: tuple[OptimizerStates, ...] = ("float32", "8bit", "host")
MODELS = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12_288, 36, 32, False),
    "14B": (5120, 17_408, 40, 40, False),
    "32B": (5120, 25_600, 64, 64, False),
}
"""Width, width of the feed-forward, layers, heads of queries, and whether the head is the embedding, as in the models'
own config.json. All have 8 heads of keys, 128 wide, and 151,936 words."""

ON_GPU = Setting(
    tokens=TOKENS,
    activation_checkpointing=True,
    half=True,
    in_chunks=True,
    has_dense_mask=False,
    ranks=1,
    has_reference=False,
    on_host=False,
)


@cache
def shape(name: str, adapter: int | None = None) -> Shape:
    """Of the model, or of an adapter of that rank beside it."""
    hidden, feed_forward, layers, heads, tied = MODELS[name]
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
        if adapter is not None:
            add_matrices(model, targets_of(model), rank=adapter, alpha=2.0 * adapter)
    return shape_of(model)


def weight_bytes(of: Shape, ranks: int = 1) -> int:
    """On one rank: float32 masters of what is trained, bf16 of what is frozen."""
    return (4 * of.trained + 2 * (of.parameters - of.trained)) // ranks


def needed(of: Shape, setting: Setting = ON_GPU) -> tuple[int, int]:
    """Bytes of one GPU, weights included, and of the host."""
    return weight_bytes(of, setting.ranks) + sum(step_bytes(of, setting).values()), kept_on_host(of, setting)


def rows(names: tuple[str, ...] = tuple(MODELS)) -> list[dict[str, str | float]]:
    """Of every model and way: GiB of a GPU and of the host, and MB of a published version."""
    found: list[dict[str, str | float]] = []
    for name in names:
        ways = {f"full, {states}": (shape(name), states) for states in STATES}
        ways |= {f"adapter {rank}": (shape(name, rank), STATES[0]) for rank in RANKS}
        for way, (of, states) in ways.items():
            gpu, host = needed(of, replace(ON_GPU, states=states))
            found.append(
                {
                    "model": name,
                    "way": way,
                    "gpu_gib": gpu / GIB,
                    "host_gib": host / GIB,
                    "version_mb": of.trained / 5e5,
                }
            )
    return found


def lines(found: list[dict[str, str | float]]) -> list[str]:
    """A table as docs/learner.md has it."""
    ways = list(dict.fromkeys(str(row["way"]) for row in found))
    made = [f"| | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
    for name in dict.fromkeys(row["model"] for row in found):
        cells = [
            f"{row['gpu_gib']:.1f} + {row['host_gib']:.1f}, {row['version_mb']:,.0f}"
            for row in found
            if row["model"] == name
        ]
        made.append(f"| {name} | {' | '.join(cells)} |")
    return made
