"""How many samples an engine without a pager of its own may draw side by side in the memory that is left.

A sample holds keys and values of every token for every layer, and the probabilities of one token while it is drawn. The
weights are counted by whoever says how many bytes are free: they are there already, or are to be subtracted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from swarm.broadcast.manifest import Layout
from swarm.errors import UserError

CPU_SHARE = 0.5
"""Of the memory that is available on a machine without a GPU: its owner wants to go on working."""

DRAW_COPIES = 8
"""Float32 rows over the vocabulary that one draw holds at most: logits as they come and as float32, scaled, noise, its
logarithm, their difference, the choice, and what the softmax takes."""

FLOAT32_BYTES = 4

ASSUMED_CONTEXT = 4096
"""Of a model whose configuration states none."""

ASSUMED_SAMPLE_TOKENS = 4096
"""Prompt and completion of a sample for which no limit was set: contexts of 40,000 tokens and more are seldom used, and
whoever reserved them would draw one sample at a time."""

EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight\Z")
"""What open models call the table of their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides the memory of a sample. `context_tokens` bounds prompt and completion together."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int

    def sample_bytes(self, tokens: int, dtype_bytes: int) -> int:
        """Memory of one sample of so many tokens. Layers with a window are counted as if they had none."""
        cached = 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes * tokens
        return cached + DRAW_COPIES * FLOAT32_BYTES * self.vocab_size


def shape_of(layout: Layout) -> ModelShape:
    """The shape that the config.json of a layout states; UserError if it states no layers or heads."""
    config = _config(layout)
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the swarm's model states no {error} in its config.json: this engine cannot tell how many samples fit; "
            "the learner has to publish a model with layers and attention heads"
        ) from error
    return ModelShape(
        layers=layers,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab_size=_vocab_size(layout, config),
        context_tokens=int(config.get("max_position_embeddings") or ASSUMED_CONTEXT),
    )


def places_that_fit(
    shape: ModelShape, *, free_bytes: int, share: float, wanted: int, tokens: int, dtype_bytes: int
) -> int:
    """Samples of `tokens` tokens (at most the context) that fit in a share of the free bytes, at most `wanted`.

    At least one, since most samples are shorter than they may be."""
    room_bytes = int(free_bytes * share)
    one_bytes = shape.sample_bytes(min(tokens, shape.context_tokens), dtype_bytes)
    return max(1, min(wanted, room_bytes // one_bytes))


def available_bytes(meminfo: str) -> int | None:
    """What Linux says of memory that programs may take without swapping, from the text of /proc/meminfo."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _vocab_size(layout: Layout, config: dict[str, Any]) -> int:
    """Rows of the embedding: what a token may be, whatever the tokenizer knows of."""
    rows = [tensor.shape[0] for tensor in layout.tensors if EMBEDDINGS.search(tensor.name) and len(tensor.shape) == 2]
    stated = config.get("vocab_size")
    return min([*rows, *([int(stated)] if stated else [])], default=1)


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
