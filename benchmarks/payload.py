"""What is broadcast: bytes that no codec makes smaller, or weights and the same weights one Adam step later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swarm.broadcast.version.manifest import Layout, TensorSpec

SLICE_ITEMS = 1 << 20  # Made this many at a time, so that memory does not follow the size
TENSORS = 4
WEIGHT_SD = 0.02  # Standard deviation of freshly initialised weights, as of Qwen's and Llama's
UPDATE_SD = 0.2294
"""Standard deviation of Adam's m / sqrt(v) long after its start, if gradients of different steps are independent:
m is then a mean over about 1 / (1 - beta1) of them, hence sqrt((1 - beta1) / (1 + beta1)) with beta1 = 0.9."""


def layout_of(nbytes: int) -> Layout:
    """A few BF16 tensors of `nbytes` together."""
    items = nbytes // 2
    extents = [items * (n + 1) // TENSORS - items * n // TENSORS for n in range(TENSORS)]
    tensors = [TensorSpec(name=f"blocks.{n}", dtype="BF16", shape=(extent,)) for n, extent in enumerate(extents)]
    return Layout(tensors=tuple(tensors), files=())


def write_random(path: Path, nbytes: int, *, seed: int) -> None:
    """Every bit pattern is as likely as any other."""
    random = np.random.default_rng(seed)
    _write(path, (random.integers(0, 1 << 16, items, dtype=np.uint16) for items in _slices(nbytes)))


def write_weights(path: Path, nbytes: int, *, seed: int, step_lr: float = 0.0) -> None:
    """N(0, 0.02) as bf16, one Adam step of `step_lr` later: the same seed gives the same fp32 masters and updates."""
    random = np.random.default_rng(seed)

    def slices() -> Iterator[NDArray[np.uint16]]:
        for items in _slices(nbytes):
            masters = random.standard_normal(items, dtype=np.float32) * np.float32(WEIGHT_SD)
            updates = random.standard_normal(items, dtype=np.float32) * np.float32(UPDATE_SD)
            yield to_bf16(masters - np.float32(step_lr) * updates)

    _write(path, slices())


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite float32 rounded to the nearest bf16, ties to even, as bit patterns."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _slices(nbytes: int) -> Iterator[int]:
    items = nbytes // 2
    for at in range(0, items, SLICE_ITEMS):
        yield min(SLICE_ITEMS, items - at)


def _write(path: Path, slices: Iterator[NDArray[np.uint16]]) -> None:
    with path.open("wb") as file:
        for patterns in slices:
            file.write(patterns.astype("<u2").tobytes())
