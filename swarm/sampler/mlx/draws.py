"""The noise of swarm/models/draws.py, which has the formula, in mlx: made where the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from swarm.models.draws import HASHED_BYTES, LARGEST

BLOCK_1, BLOCK_2, STEP, FINAL_1, FINAL_2 = (0xCC9E2D51, 0x1B873593, 0xE6546B64, 0x85EBCA6B, 0xC2B2AE35)


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Any:
    """Return the noise of all tokens, float32 [rows, vocabulary], not yet computed."""
    state = mx.zeros(len(seeds), dtype=mx.uint32)
    for word in ([seed & 0xFFFFFFFF for seed in seeds], [seed >> 32 & 0xFFFFFFFF for seed in seeds], positions):
        state = _mixed(state ^ _scrambled(mx.array(word, dtype=mx.uint32)))
    state = _mixed(state[:, None] ^ _scrambled(mx.arange(vocab_size, dtype=mx.uint32))) ^ HASHED_BYTES
    state = (state ^ state >> 16) * FINAL_1
    state = (state ^ state >> 13) * FINAL_2
    state = state ^ state >> 16
    # Both halves are exact in float32, and small u, whose noise is large and wins, keep all their bits.
    low = ((state & 0xFFFF).astype(mx.float32) + 0.5) * 2.0**-32
    u = mx.minimum((state >> 16).astype(mx.float32) * 2.0**-16 + low, LARGEST)
    return -mx.log(-mx.log1p(-u))


def _scrambled(keys: Any) -> Any:
    return _rotated(keys * BLOCK_1, 15) * BLOCK_2


def _mixed(state: Any) -> Any:
    return _rotated(state, 13) * 5 + STEP


def _rotated(values: Any, bits: int) -> Any:
    return values << bits | values >> 32 - bits
