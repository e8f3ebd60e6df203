"""A version's weights as a file: whether they match the signature, and whether a model has the same tensors.

torch is imported only when it is needed: an engine without a model does without it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from swarm.broadcast.version.codec import MIX, tensor_sum
from swarm.broadcast.version.manifest import Layout, TensorSpec, tensor_spans
from swarm.errors import EchoError

if TYPE_CHECKING:
    import torch


class WrongWeights(EchoError):
    """The tensors of the model are not those of the swarm."""


def wrong_tensor(path: str, layout: Layout, sums: tuple[int, ...], progress: Callable[[], None]) -> str | None:
    """Return what in the file at `path` differs from what was signed, or None. Blocking. It reads the whole file, so an
    engine then finds it in memory."""
    with open(path, "rb") as file:
        held = file.seek(0, 2)
        if held != layout.total_bytes:
            return f"the file has {held} bytes instead of {layout.total_bytes}"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
            for tensor, span, expected in zip(layout.tensors, tensor_spans(layout), sums, strict=True):
                with whole[span.start : span.start + span.nbytes] as part:
                    if tensor_sum(part) != expected:
                        return f"tensor {tensor.name} in the file is not the learner's"
                progress()
    return None


def sum_of_counts(counts: Any) -> int:
    """Return the `tensor_sum` of 16-bit words that occur `counts` times (65,536 of numpy's uint64): weights on a device
    are counted there."""
    return int((counts * MIX).sum(dtype=counts.dtype))


def mapped_tensors(path: str, layout: Layout) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield the file's tensors in layout order: views of one read-only map, to be copied and never kept."""
    import torch

    from swarm.learner.device import TORCH_DTYPES

    flat = torch.from_file(path, size=layout.total_bytes, dtype=torch.uint8)
    for spec, span in zip(layout.tensors, tensor_spans(layout), strict=True):
        yield spec, flat[span.start : span.start + span.nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def check_coverage(own: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Check that the stream carries exactly the model's tensors. Raise WrongWeights that names one that differs."""
    held = {name: tuple(tensor.shape) for name, tensor in own.items()}
    sent = {name: spec.shape for spec in layout.tensors for name in (spec.name, *spec.aliases)}
    for name in sorted(held.keys() | sent.keys()):
        if held.get(name) != sent.get(name):
            raise WrongWeights(
                f"tensor {name} has shape {held.get(name)} in this model and {sent.get(name)} in the swarm"
            )
