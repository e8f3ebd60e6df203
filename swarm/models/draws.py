"""Draws that anybody can replay: the noise of each token is a hash of the sample's seed, its position and the token.

The argmax over the vocabulary of logit / T + g is an exact draw from softmax(logits / T) if the g are independent
standard Gumbel variables. Here, in float32,

    h = MurmurHash3 (x86, 32 bits, hash seed 0) of 16 bytes, little-endian: seed (8), position (4), token (4)
    u = (h + 1/2) / 2^32, at most 1 - 2^-24
    g = -log(-log1p(-u))

The position is how many tokens, prompt and completion, stand before the drawn one, less one. So a sample does not
depend on what else is in its batch, on its engine, or on which node drew its first half. vLLM 0.32 draws so on GPUs.
"""

from __future__ import annotations

import torch

AT_ONCE = 1 << 20  # Items of noise made at a time: a few MB of temporaries, whatever the batch and the vocabulary

BLOCK_1, BLOCK_2, STEP, FINAL_1, FINAL_2 = (
    constant - (constant >> 31 << 32) for constant in (0xCC9E2D51, 0x1B873593, 0xE6546B64, 0x85EBCA6B, 0xC2B2AE35)
)
"""MurmurHash3's, as 32-bit integers with a sign: torch has few operations without one. Products wrap either way."""
HASHED_BYTES = 16
LARGEST = 1 - 2**-24
GREEDY = -1  # Instead of a seed: no noise


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the noise of all tokens, float32 [rows, vocabulary], for int64 `seeds` and `positions` of shape [rows]."""
    device = seeds.device
    tokens = _scrambled(torch.arange(vocab_size, dtype=torch.int32, device=device))
    words = (seeds, seeds >> 32, positions)
    state = torch.zeros(len(seeds), dtype=torch.int32, device=device)
    for word in words:
        state = _mixed(state ^ _scrambled(_low(word)))
    noise = torch.empty(len(seeds), vocab_size, device=device)
    rows = max(1, AT_ONCE // vocab_size)
    for part, states in zip(noise.split(rows), state.split(rows), strict=True):
        _fill(part, _mixed(states[:, None] ^ tokens))
    return noise


def _low(words: torch.Tensor) -> torch.Tensor:
    """The low 32 bits."""
    return ((words & 0xFFFFFFFF) - ((words & 0x80000000) << 1)).to(torch.int32)


def _right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift in zeros."""
    return (values >> bits).bitwise_and_((1 << 32 - bits) - 1)


def _rotated(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values << bits).bitwise_or_(_right(values, 32 - bits))


def _scrambled(keys: torch.Tensor) -> torch.Tensor:
    return _rotated(keys * BLOCK_1, 15).mul_(BLOCK_2)


def _mixed(state: torch.Tensor) -> torch.Tensor:
    return _rotated(state, 13).mul_(5).add_(STEP)


def _fill(noise: torch.Tensor, state: torch.Tensor) -> None:
    state.bitwise_xor_(HASHED_BYTES)
    for shift, factor in ((16, FINAL_1), (13, FINAL_2)):
        state.bitwise_xor_(_right(state, shift)).mul_(factor)
    state.bitwise_xor_(_right(state, 16))
    # Both halves are exact in float32, and small u, whose noise is large and wins, keep all their bits.
    torch.mul(_right(state, 16), 2.0**-16, out=noise)
    noise.add_(state.bitwise_and_(0xFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32)).clamp_(max=LARGEST)
    noise.neg_().log1p_().neg_().log_().neg_()
