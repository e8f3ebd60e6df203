"""The sums of a chunk table, compared with what lies in a file and with what an engine holds."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from swarm.broadcast.codec import MIX, tensor_sum
from swarm.broadcast.manifest import Layout


def wrong_tensor(path: str, layout: Layout, sums: tuple[int, ...], progress: Callable[[], None]) -> str | None:
    """The first tensor of the file at `path` whose sum is not the one that was signed, None if all are right. Reads the
    whole file, so that an engine finds it in memory. Blocking."""
    with open(path, "rb") as file:
        held = file.seek(0, 2)
        if held != layout.total_bytes:
            return f"the file has {held} bytes instead of {layout.total_bytes}"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
            at = 0
            for tensor, expected in zip(layout.tensors, sums, strict=True):
                with whole[at : at + tensor.nbytes] as part:
                    if tensor_sum(part) != expected:
                        return f"tensor {tensor.name} in the file is not the learner's"
                at += tensor.nbytes
                progress()
    return None


def sum_of_counts(counts: Any) -> int:
    """`tensor_sum` of words of which `counts` (65,536 of numpy's uint64) says how often each occurs: whoever holds them
    on another device counts them there."""
    return int((counts * MIX).sum(dtype=counts.dtype))
