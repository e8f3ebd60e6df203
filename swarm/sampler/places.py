"""How many samples an engine without a pager of its own may draw side by side in the memory that is left.

A sample holds keys and values of every token for every layer, and the probabilities of one token while it is drawn. The
weights are counted by whoever says how many bytes are free: they are there already, or are to be subtracted.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
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

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""What open models call their shape; GPT-2, Bloom and MPT have names of their own."""

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
    """The shape that the config.json of a layout states; UserError if it states no layers or no width. A model without
    heads is counted as if it cached its whole width for each token, which is more than any state takes."""
    config = _config(layout)
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
        vocab_size=_vocab_size(layout, config),
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
    room_bytes = int(free_bytes * share)
    one_bytes = shape.sample_bytes(min(tokens, shape.context_tokens), dtype_bytes)
    return max(1, min(wanted, room_bytes // one_bytes))


def memory_left_bytes() -> int:
    """What programs may take on this machine without swapping; where the system does not say, all of its memory."""
    try:
        available = available_bytes(Path("/proc/meminfo").read_text())
    except OSError:
        available = None
    # Pages that are free (SC_AVPHYS_PAGES) would not do: on a machine that has run for a while files fill nearly all.
    return available or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
