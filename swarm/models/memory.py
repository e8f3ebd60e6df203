"""What a model takes of memory, by its shape: weights, the keys and values of samples, the activations of a step.

Arithmetic alone. The learner reads a shape from a model (`learner/memory.py`), a sampler from a version's layout
(`sampler/room.py`), and each adds what it alone holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GIB = 1 << 30
ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
ROUNDED_BYTES = {"fp8": 1.01, "int8": 1.01, "int4": 0.57, "nf4": 0.5625}
"""Of a number in a rounded matrix, scales included: one of four bytes a row, or two of two bytes for 64 numbers; in nf4
one of four bytes for 64 numbers."""

DRAW_COPIES = 8
"""Max float32 rows over the vocabulary that one draw holds: logits as they come and as float32, scaled, noise, their
sum, the choice, and the softmax's temporaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Widths in elements: `hidden` of the residual stream, `feed_forward` of all experts that one token takes,
    `queries` and `keys` of all heads. `layer_parameters` are those of the largest layer, `other_parameters` all outside
    of layers. `trained` of all are not frozen. `rounded` are in matrices that are, or may be, held in fewer bits. 0
    `context_tokens` is no known limit."""

    parameters: int
    trained: int = 0
    layer_parameters: int
    other_parameters: int
    layers: int
    hidden: int
    feed_forward: int
    queries: int
    keys: int
    vocab_size: int
    rounded: int = 0
    context_tokens: int = 0


def widths(number: Callable[..., int], width: int) -> dict[str, int]:
    """Return the widths of a Shape. `number` says what a configuration has under the first of some names, or 0; what it
    does not have is guessed on the high side, from the embedding's `width`."""
    # A model without heads is counted as if it kept its whole width of each token, which is more than any state takes.
    heads = number("num_attention_heads", "n_head") or 1
    hidden = number("hidden_size", "n_embd", "d_model") or width
    head = number("head_dim") or hidden // heads
    experts = number("num_experts_per_tok")
    feed_forward = number(*["moe_intermediate_size"] * bool(experts), "intermediate_size") or 4 * hidden
    return {
        "hidden": hidden,
        "feed_forward": feed_forward * (experts or 1),
        "queries": heads * head,
        "keys": (number("num_key_value_heads") or heads) * head,
    }


def weights_bytes(shape: Shape, dtype: str, rounding: str = "none") -> int:
    """What is trained is held in float32, what is frozen in `dtype`, and of it what can be rounded as `rounding`."""
    item = ITEM_BYTES[dtype]
    frozen = shape.parameters - shape.trained - shape.rounded
    return int(4 * shape.trained + item * frozen + ROUNDED_BYTES.get(rounding, item) * shape.rounded)


def sample_bytes(shape: Shape, tokens: int, dtype: str) -> int:
    """Return the memory of one sample of `tokens`: keys and values of each token in each layer, ignoring attention
    windows, and the probabilities while one token is drawn."""
    return int(2 * shape.layers * shape.keys * ITEM_BYTES[dtype] * tokens) + DRAW_COPIES * 4 * shape.vocab_size


def activation_bytes(shape: Shape, tokens: int, *, half: bool, checkpointing: bool) -> int:
    """Return what the layers keep for the backward pass, counted from what autograd keeps of a decoder layer of the
    Llama and Qwen kind in transformers 5.

    For one token in one layer: each norm, of queries and keys too, keeps its input in float32, what it normalised, and
    its output, which for queries and keys is rotated. The values are kept too, and the result of attention, and of the
    feed-forward gate, its activation, up, and their product. With checkpointing each layer keeps its input, and one
    layer at a time is whole.
    """
    width, heads = 2 if half else 4, shape.queries + shape.keys
    layer = 4 * (2 * shape.hidden + heads) + width * (4 * shape.hidden + 3 * heads + 4 * shape.feed_forward)
    if checkpointing:
        return tokens * (width * shape.hidden * shape.layers + layer)
    return tokens * layer * shape.layers


def size(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{nbytes / (1 << 20):.1f} MiB"
