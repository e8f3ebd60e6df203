"""Where a model runs; the dtypes of tensors in torch's words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from swarm.bounded import Bounded
from swarm.broadcast.version.manifest import Dtype
from swarm.errors import UserError

SMALL_MODEL_PARAMETERS = 10_000_000  # Below this a second thread or micro-batch costs more than it brings


TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PERIOD = 1 << 20  # Items after which thresholds repeat: their 4 MB stay in a cache
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def stream_dtype(tensor: torch.Tensor) -> Dtype:
    """The dtype of a tensor in the stream: every float is published as bf16, everything else as it is."""
    return "BF16" if tensor.is_floating_point() else DTYPE_NAMES[tensor.dtype]


def as_streamed(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """A tensor as it is published, in its shape. `first` is the place of its first item in the whole tensor.

    A float32 becomes bf16 by a threshold of its own: it is rounded up in magnitude if what bf16 cuts off, as a share of
    the step between two numbers, is large enough for its place. The thresholds are evenly spread and always the same.
    So of many weights that have moved by a tenth of a step a tenth is published as moved, each once; rounded to the
    nearest, none would be until it has moved by half of one, and a model begins at numbers of bf16 (decision 0020).
    """
    if not tensor.is_floating_point():
        return tensor
    if tensor.dtype != torch.float32:
        return tensor.to(torch.bfloat16)
    bits = tensor.detach().contiguous().view(-1).view(torch.int32)
    streamed = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
    upper = streamed.view(-1).view(torch.int16)
    for block, thresholds in _blocks(bits, first):
        upper[block] = (bits[block] + thresholds) >> 16
    return streamed


def round_off(tensor: torch.Tensor, first: int = 0) -> None:
    """Change a float32 in place so that the nearest number of bf16 is what is published of it. What was cut off stays,
    halved, in the bits below, so the last of its 23 bits is rounded away: to even, which favours no direction."""
    bits = tensor.view(-1).view(torch.int32)
    for block, thresholds in _blocks(bits, first):
        own = bits[block] + (bits[block] >> 1 & 1) & ~1
        bits[block] = (own + thresholds & ~0xFFFF) + (own >> 1 & 0x7FFF)


def put_back(tensor: torch.Tensor, first: int = 0) -> None:
    """Undo `round_off`."""
    bits = tensor.view(-1).view(torch.int32)
    for block, thresholds in _blocks(bits, first):
        lower = (bits[block] & 0x7FFF) << 1
        bits[block] = (bits[block] & ~0xFFFF) - (lower + thresholds & 0x10000) + lower


def _blocks(bits: torch.Tensor, first: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of a tensor, whose first item is at the place `first`, and their thresholds."""
    own, start = _thresholds(bits.device), 0
    while start < len(bits):
        thresholds = own[(first + start) % PERIOD :][: len(bits) - start]
        yield slice(start, start := start + len(thresholds)), thresholds


@cache
def _thresholds(device: torch.device) -> torch.Tensor:
    """Of the lower 16 bits, [PERIOD]: multiples of the golden ratio, which are even along rows and columns alike."""
    return ((torch.arange(PERIOD) * 0x9E3779B1 & 0xFFFFFFFF) >> 16).to(device, torch.int32)


def pick_device(wanted: str) -> torch.device:
    """`auto` is the first CUDA device if there is one. UserError if `wanted` is not a device of this machine. Has this
    process compute attention without cuDNN, which torch prefers on Hopper and which plans each new shape for 0.1 s."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"--device {wanted} cannot be used here ({reason}); auto, cpu, cuda:0 or, on a Mac, mps may be"
        ) from error
    return device


def is_cpu_fast_in_half(device: torch.device, parameters: int) -> bool:
    """Whether this is a CPU that multiplies bf16 faster than float32, and the model large enough to gain by it. With
    units for it (measured with 134 million parameters) it takes half the time, without them five times as much."""
    units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cpu" and units and parameters >= SMALL_MODEL_PARAMETERS


def stated(config: Any, *names: str) -> Any:
    """What a configuration says under the first of these names that it has, of layers that differ the largest."""
    for name in names:
        by_layer = name in (getattr(config, "per_layer_attributes", None) or ())
        own = [getattr(one, name, None) for one in (config.per_layer_config if by_layer else (config,))]
        if found := [value for value in own if value is not None]:
            return max(found) if by_layer else found[0]
    return None


def has_full_attention(model: Any) -> bool:
    """Whether every layer attends to all tokens before, so that what it makes of a prompt serves all that follow it."""
    config = model.config.get_text_config()
    kinds = set(stated(config, "layer_types") or ["full_attention"])
    window = stated(config, "sliding_window") if stated(config, "use_sliding_window") is not False else None
    return kinds == {"full_attention"} and window is None and bool(stated(config, "num_attention_heads"))


_MAPPED: Bounded[tuple[int, int], torch.Tensor] = Bounded(2)  # A node's map, and the file that takes its place


def mapped_file(path: str | Path, nbytes: int) -> torch.Tensor:
    """Map a file for reading, or find its map: in a new one each page faults when it is first used, which takes longer
    than a copy. While a file is mapped no other one gets its inode."""
    state = os.stat(path)
    key = state.st_dev, state.st_ino
    flat = _MAPPED.pop(key, None)
    if flat is None or not flat.nbytes == nbytes == state.st_size:
        flat = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
    _MAPPED[key] = flat
    return flat
