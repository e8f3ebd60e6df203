"""The noise of draws is the documented hash, so that anybody can replay them."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch

from swarm.models import draws
from swarm.models.draws import gumbel

WORD = 0xFFFFFFFF


def murmur(data: bytes) -> int:
    """MurmurHash3, x86, 32 bits, seed 0, of whole words; written from its description."""
    state = 0
    for start in range(0, len(data), 4):
        key = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & WORD
        key = (key << 15 | key >> 17) * 0x1B873593 & WORD
        state ^= key
        state = ((state << 13 | state >> 19) * 5 + 0xE6546B64) & WORD
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & WORD
    return state ^ state >> 16


def expected_noise(seed: int, position: int, token: int) -> float:
    words = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + token.to_bytes(4, "little")
    u = float(np.float32((murmur(words) + 0.5) / 2**32))
    return -math.log(-math.log1p(-min(u, draws.LARGEST)))


def test_the_reference_is_murmur_hash() -> None:
    """A published vector: the four bytes of "test"."""
    assert murmur(b"test") == 0xBA6BD213


def test_the_noise_is_the_documented_hash() -> None:
    random = Random(0)
    seeds = [0, 2**63 - 1, *(random.getrandbits(63) for _ in range(60))]
    positions = [0, 2**31 - 1, *(random.randrange(1 << 20) for _ in range(60))]
    noise = gumbel(torch.tensor(seeds), torch.tensor(positions), 300)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in (0, 1, 17, 255, 256, 299):
            assert float(noise[row, token]) == pytest.approx(expected_noise(seed, position, token), rel=2e-6, abs=2e-6)


def test_the_noise_does_not_depend_on_what_is_made_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = torch.arange(40) * 7919, torch.arange(40)
    together = gumbel(seeds, positions, 100)
    monkeypatch.setattr(draws, "AT_ONCE", 350)
    assert torch.equal(gumbel(seeds, positions, 100), together)
    assert torch.equal(gumbel(seeds[3:4], positions[3:4], 60), together[3:4, :60])
