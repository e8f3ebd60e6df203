"""The stream's tensors in torch's words, and whether a model has the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from swarm.broadcast.version.manifest import Layout, TensorSpec, tensor_spans
from swarm.errors import EchoError
from swarm.learner.device import TORCH_DTYPES


class WrongWeights(EchoError):
    """The tensors of the model are not those of the swarm."""


def mapped_tensors(path: str, layout: Layout) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """The tensors of the file at `path`, in layout order: views of one read-only map, to be copied and never kept."""
    flat = torch.from_file(path, size=layout.total_bytes, dtype=torch.uint8)
    for spec, span in zip(layout.tensors, tensor_spans(layout), strict=True):
        yield spec, flat[span.start : span.start + span.nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def check_coverage(own: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Every tensor of the model comes in the stream, and nothing else does; WrongWeights names one that differs."""
    held = {name: tuple(tensor.shape) for name, tensor in own.items()}
    sent = {name: spec.shape for spec in layout.tensors for name in (spec.name, *spec.aliases)}
    for name in sorted(held.keys() | sent.keys()):
        if held.get(name) != sent.get(name):
            raise WrongWeights(
                f"tensor {name} has shape {held.get(name)} in this model and {sent.get(name)} in the swarm"
            )
