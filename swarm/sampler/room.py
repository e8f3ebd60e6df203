"""Whether a model and a few samples fit into what is free, reckoned from the layout before any weights are fetched.

What an engine holds of the weights follows from their shapes, its dtype and its precision; what a sample takes follows
from its length. Where too little is free, the error names what would fit. Only the functions under `reading` look at
the machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import prod
from typing import Any

import msgspec

from swarm.broadcast.version.manifest import LORA_A, LORA_B, Layout, TensorSpec
from swarm.errors import UserError
from swarm.machine import free_host_bytes
from swarm.sampler.engine import ASSUMED_SAMPLE_TOKENS, EngineKind, EngineOptions, Reckoned
from swarm.types import Rounding

FEW = 4  # Samples that have to fit: one at a time leaves a device idle for most of each step
CPU_PLACES = 128  # Most samples side by side without a GPU: its cores are busy with fewer
GPU_PLACES = 512  # Most on a GPU: a step with more takes longer, and more leases in one hand hold up more groups
CPU_SHARE = 0.5  # Of the memory left on a machine without a GPU: its owner wants to go on working
KV_SHARE = 0.25  # The same for vLLM, which holds packed weights beside those that come in
VLLM_BYTES = 1 << 30  # Of a GPU, for vLLM's graphs and what a step computes with
MIN_TOKENS = 256  # Shorter samples than this are of no use to a swarm whose samples may be longer
OTHERS_SHARE = 0.02  # Of a GPU that others use, left to them beside what they have: a desktop's windows come and go

DRAW_COPIES = 8
"""Most float32 rows over the vocabulary that one draw holds: logits as they come and as float32, scaled, noise, their
sum, the choice, and the softmax's temporaries."""

ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
ROUNDED_BYTES: dict[Rounding, float] = {"fp8": 1.01, "int8": 1.01, "int4": 0.57}
"""Of a number in a rounded matrix, scales included: one of four bytes a row, or two of two bytes for 64 numbers."""

ASK_S = 60.0  # A driver that slept wakes within seconds
ASK_GPUS = "import sys, torch; [print(*torch.cuda.mem_get_info(i)) for i in range(int(sys.argv[1]))]"
ADAPTER_SLOTS = 6  # Versions that vLLM holds: two more than twice the default bound of staleness, which it is not told
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # For which vLLM has kernels
PRECISIONS: tuple[Rounding, ...] = ("fp8", "int8", "int4")  # What vLLM rounds to, mildest first
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What an engine's memory depends on: items in the matrices of layers, which may be rounded, and of all the rest;
    `keys` is the width of a token's keys in one layer; 0 `context_tokens` is no known limit."""

    matrices: int
    others: int
    layers: int
    keys: int
    vocab_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where a model will run: `free_bytes` are for the weights, and `share` of what they leave is for samples. Numbers
    take `dtype` there, and matrices may be rounded to `precisions`, if need be by vLLM instead of the engine here."""

    where: str
    free_bytes: int
    share: float
    most_places: int
    dtype: str
    precisions: tuple[Rounding, ...] = ()
    with_vllm: bool = False


def model_of(layout: Layout) -> Model:
    """Read a layout and its config.json; what that does not say is guessed on the high side."""
    config = _config(layout)
    layers = {found[1] for tensor in layout.tensors if (found := LAYER.search(tensor.name))}
    matrices = sum(prod(tensor.shape) for tensor in layout.tensors if is_rounded(tensor))
    outside = [tensor.shape for tensor in layout.tensors if not LAYER.search(tensor.name) and len(tensor.shape) > 1]
    vocabulary, width = max(outside, key=prod, default=(1, 1))[:2]
    hidden = _number(config, "hidden_size", "n_embd", "d_model") or width
    # A model without heads is counted as if it kept its whole width of each token, which is more than any state takes.
    heads = _number(config, "num_attention_heads", "n_head") or 1
    head = _number(config, "head_dim") or hidden // heads
    return Model(
        matrices=matrices,
        others=sum(prod(tensor.shape) for tensor in layout.tensors) - matrices,
        layers=max(1, len(layers)),
        keys=(_number(config, "num_key_value_heads") or heads) * head,
        vocab_size=_number(config, "vocab_size") or vocabulary,
        context_tokens=_number(config, "max_position_embeddings", "n_positions"),
    )


def is_rounded(tensor: TensorSpec) -> bool:
    return len(tensor.shape) > 1 and bool(LAYER.search(tensor.name)) and not tensor.name.endswith((LORA_A, LORA_B))


def adapter_rank(layout: Layout) -> int:
    """Return the smallest rank of vLLM's that holds the run's adapter; vLLM refuses a larger one."""
    rank = layout.adapter.rank if layout.adapter else 1
    return next((one for one in ADAPTER_RANKS if one >= rank), rank)


def adapter_slots(options: EngineOptions) -> int:
    """Return how many versions of an adapter vLLM holds. Raise UserError for an argument that cannot do."""
    slots = options.arguments.get("max_loras", ADAPTER_SLOTS)
    if not isinstance(slots, int) or slots < 2:
        raise UserError("max_loras has to be 2 or more: a version is loaded before an older one goes")
    return slots


def adapters_bytes(layout: Layout, options: EngineOptions, dtype: str) -> int:
    """Return what the slots of vLLM take for adapters. Every GPU is counted as if it held all of each."""
    if layout.adapter is None:
        return 0
    items = sum(prod(tensor.shape) for tensor in layout.tensors if not tensor.frozen)
    copies = adapter_slots(options) * options.tensor_parallel_size
    return int(copies * items * adapter_rank(layout) / layout.adapter.rank * ITEM_BYTES[dtype])


def _config(layout: Layout) -> dict[str, Any]:
    content = next((file.content for file in layout.files if file.name == "config.json"), b"{}")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    inner = config.get("text_config", config) if isinstance(config, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _number(config: dict[str, Any], *names: str) -> int:
    return next((found for name in names if isinstance(found := config.get(name), int) and found > 0), 0)


def weights_bytes(model: Model, dtype: str, precision: Rounding) -> int:
    item = ITEM_BYTES[dtype]
    return int(model.others * item + model.matrices * ROUNDED_BYTES.get(precision, item))


def sample_tokens(model: Model, options: EngineOptions) -> int:
    """Return the tokens of a sample that has a place: what the owner allows, at most what the run and the model do."""
    tokens = options.max_model_len or ASSUMED_SAMPLE_TOKENS
    return min(tokens, options.sample_tokens or tokens, model.context_tokens or tokens)


def sample_bytes(model: Model, tokens: int, dtype: str) -> int:
    """Return the memory of one sample of `tokens`: keys and values of each token in each layer, ignoring attention
    windows, and the probabilities while one token is drawn."""
    return int(2 * model.layers * model.keys * ITEM_BYTES[dtype] * tokens) + DRAW_COPIES * 4 * model.vocab_size


def fitting(model: Model, device: Device, options: EngineOptions) -> int:
    """Return how many samples fit beside the weights; negative if not even these do."""
    left = device.free_bytes - weights_bytes(model, device.dtype, options.precision)
    return int(left * device.share) // sample_bytes(model, sample_tokens(model, options), device.dtype)


def places(model: Model, device: Device, options: EngineOptions) -> int:
    """Return how many samples to draw side by side: as many as fit, at most those asked for. Raise UserError, with what
    would fit, if there is no room for a few."""
    fits = fitting(model, device, options)
    few = min(options.places or FEW, FEW)
    if fits >= few:
        return min(options.places or device.most_places, fits)
    tokens = sample_tokens(model, options)
    held = _size(weights_bytes(model, device.dtype, options.precision))
    kind = device.dtype if options.precision == "none" else options.precision
    one = _size(sample_bytes(model, tokens, device.dtype) / device.share)
    changes = ", or ".join([*_changes(model, device, options), "end what else runs there", "help with --role relay"])
    raise UserError(
        f"too little memory: {device.where} has {_size(device.free_bytes)} free, and the swarm's model takes {held} in "
        f"{kind}, beside {few} sample{'' if few == 1 else 's'} of {tokens:,} tokens and {one} each; change: {changes}"
    )


def _changes(model: Model, device: Device, options: EngineOptions) -> list[str]:
    """Return changes of which each alone would do, or else two that do together."""
    lighter = list(_lighter(device, options))
    found = [name for name, where, asked in lighter if _fits(model, where, asked)]
    found += _fewer(model, device, options)
    pairs = (f"{name} {less}" for name, where, asked in lighter for less in _fewer(model, where, asked))
    return found or list(islice(pairs, 1))


def _fits(model: Model, device: Device, options: EngineOptions) -> bool:
    return fitting(model, device, options) >= min(options.places or FEW, FEW)


def _lighter(device: Device, options: EngineOptions) -> Iterator[tuple[str, Device, EngineOptions]]:
    """Yield ways to hold the weights in less."""
    if device.dtype == "float32":
        yield "--dtype bfloat16", dataclasses.replace(device, dtype="bfloat16"), options
    held = ROUNDED_BYTES.get(options.precision, ITEM_BYTES[device.dtype])
    for precision in device.precisions:
        if ROUNDED_BYTES[precision] < held:
            free = device.free_bytes - (VLLM_BYTES if device.with_vllm else 0)
            engine = "--engine vllm " if device.with_vllm else ""
            where = dataclasses.replace(device, free_bytes=free)
            yield f"{engine}--precision {precision}", where, msgspec.structs.replace(options, precision=precision)


def _fewer(model: Model, device: Device, options: EngineOptions) -> Iterator[str]:
    """Yield fewer and shorter samples that fit."""
    if (fits := fitting(model, device, options)) > 0:
        yield f"--batch-samples {fits}"
    tokens = sample_tokens(model, options) // 2
    while tokens >= MIN_TOKENS:
        if _fits(model, device, msgspec.structs.replace(options, max_model_len=tokens)):
            yield f"--max-model-len {tokens}"
            return
        tokens //= 2


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def reckon(kind: EngineKind, layout: Layout, options: EngineOptions) -> Reckoned:
    """Return how many samples fit here, and what is said of that. Raise UserError if there is no room for a few."""
    model, device = model_of(layout), measured(kind, options)
    beside = adapters_bytes(layout, options, device.dtype) if kind == "vllm" else 0
    if kind == "mlx":
        # An install holds all experts as they came beside those that it had, until they are stacked.
        beside = sum(tensor.nbytes for tensor in layout.tensors if len(tensor.shape) > 2)
    device = dataclasses.replace(device, free_bytes=device.free_bytes - beside)
    if layout.adapter is not None and kind != "mlx":
        device = dataclasses.replace(device, precisions=())
    count, tokens = places(model, device, options), sample_tokens(model, options)
    held = weights_bytes(model, device.dtype, options.precision)
    return Reckoned(
        places=count,
        said=f"room: {_size(device.free_bytes)} free on {device.where}, of which the engine's weights take "
        f"{_size(held)} and up to {count} samples of {tokens:,} tokens "
        f"{_size(count * sample_bytes(model, tokens, device.dtype))}",
    )


# -- reading -----------------------------------------------------------------------------------------------------


def measured(kind: EngineKind, options: EngineOptions) -> Device:
    """Ask this machine what is free where an engine of this kind would run now."""
    if kind == "mlx":
        return _measured_for_mlx(options)
    import torch

    from swarm.models.device import pick_device

    is_vllm, count = kind == "vllm", options.tensor_parallel_size
    device = torch.device("cuda" if torch.version.cuda else "cpu") if is_vllm else pick_device(options.device)
    is_gpu = device.type == "cuda"
    if not is_gpu:
        where, free, share = "this machine", free_host_bytes(), KV_SHARE if is_vllm else CPU_SHARE
    elif is_vllm:
        each = int(memory_share(options) * free_of_gpus(count)[1]) - VLLM_BYTES
        where, free, share = f"what vLLM may use of {count} GPU{'' if count == 1 else 's'}", count * each, 1.0
    else:
        where, free, share = f"the GPU ({device})", torch.cuda.mem_get_info(device)[0], options.gpu_memory_share
    return Device(
        where=where,
        free_bytes=free,
        share=share,
        most_places=GPU_PLACES if is_gpu else CPU_PLACES,
        dtype=dtype_of(options, is_gpu=is_gpu),
        precisions=PRECISIONS if is_gpu or is_vllm else (),
        with_vllm=not is_vllm,
    )


def _measured_for_mlx(options: EngineOptions) -> Device:
    """On Apple silicon the memory is the machine's; the driver says how much of it one program should take."""
    import mlx.core as mx

    is_gpu, free = options.device != "cpu" and mx.metal.is_available(), free_host_bytes()
    if is_gpu:
        free = int(min(mx.device_info()["max_recommended_working_set_size"], free) * options.gpu_memory_share)
    auto = "bfloat16" if is_gpu else "float32"
    return Device(
        where="what mlx may use of this Mac's GPU" if is_gpu else "this machine",
        free_bytes=free,
        share=1.0 if is_gpu else CPU_SHARE,
        most_places=CPU_PLACES,
        dtype=auto if options.dtype == "auto" else options.dtype,
        precisions=("int8", "int4"),
    )


def dtype_of(options: EngineOptions, *, is_gpu: bool) -> str:
    """Return what an engine's numbers take: float32 holds every bf16 value exactly, and CPUs without bf16 units are
    slower with it; but vLLM's kernel for int4 on CPUs knows bf16 alone."""
    if options.dtype != "auto":
        return options.dtype
    return "bfloat16" if is_gpu or options.precision == "int4" else "float32"


def vllm_share(free: int, whole: int, wanted: float) -> float:
    """Return which share of a GPU vLLM may be given: what its owner allows, at most what is free now. vLLM fails at its
    start if it finds less free than that."""
    return min(wanted, max(0.0, math.floor(100 * free / whole) / 100 - (OTHERS_SHARE if free < whole else 0.0)))


def memory_share(options: EngineOptions) -> float:
    return vllm_share(*free_of_gpus(options.tensor_parallel_size), options.gpu_memory_share)


@cache
def free_of_gpus(count: int) -> tuple[int, int]:
    """Return the bytes that are free on the fullest of the first `count` GPUs, and all of its bytes. They are read
    once, before this process takes any, and in a process of their own: here the context would keep half a gigabyte."""
    done = subprocess.run(
        [sys.executable, "-c", ASK_GPUS, str(count)], capture_output=True, text=True, timeout=ASK_S, check=False
    )
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    if done.returncode or len(found) < count:
        why = done.stderr.strip().splitlines()[-1:] or [f"{len(found)} of {count} GPUs are here"]
        raise UserError(f"the GPU could not be asked what is free ({why[0]}): see nvidia-smi")
    return min(found)[0], min(found)[1]
