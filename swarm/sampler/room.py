"""Whether a model and a few samples fit into what is free, reckoned from the layout before any weights are fetched.

What an engine holds of the weights follows from their shapes, its dtype and its precision; what a sample takes follows
from its length. Only the functions under `reading` look at the machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

from swarm.broadcast.version.manifest import LORA_A, LORA_B, Layout, TensorSpec
from swarm.errors import UserError
from swarm.machine import free_host_bytes
from swarm.models.memory import ITEM_BYTES, Shape, sample_bytes, size, weights_bytes, widths
from swarm.sampler.engine import ASSUMED_SAMPLE_TOKENS, EngineKind, EngineOptions, Reckoned

FEW = 4  # Samples that have to fit: one at a time leaves a device idle for most of each step
CPU_PLACES = 128  # Most samples side by side without a GPU: its cores are busy with fewer
GPU_PLACES = 512  # Most on a GPU: a step with more takes longer, and more leases in one hand hold up more groups
CPU_SHARE = 0.5  # Of the memory left on a machine without a GPU: its owner wants to go on working
KV_SHARE = 0.25  # The same for vLLM, which holds packed weights next to those that come in
VLLM_BYTES = 1 << 30  # Of a GPU, for vLLM's graphs and what a step computes with
OTHERS_SHARE = 0.02  # Of a GPU that others use, left to them on top of what they have: a desktop's windows come and go

ASK_S = 60.0  # A driver that slept wakes within seconds
ASK_GPUS = "import sys, torch; [print(*torch.cuda.mem_get_info(i)) for i in range(int(sys.argv[1]))]"
ADAPTER_SLOTS = 6  # Versions that vLLM holds: two more than twice the default bound of staleness, which it is not told
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # For which vLLM has kernels
LIGHTER = {True: "--precision int4", False: "--engine vllm --precision int4"}
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where a model will run: `free_bytes` are for the weights, and `share` of what they leave is for samples. Numbers
    take `dtype` there; `lighter` are the options that hold weights in less."""

    where: str
    free_bytes: int
    share: float
    max_places: int
    dtype: str
    lighter: str = ""


def shape_of_layout(layout: Layout) -> Shape:
    """Read a layout and its config.json; what that does not say is guessed on the high side."""
    config = _config(layout)
    by_layer: Counter[str] = Counter()
    for tensor in layout.tensors:
        by_layer[found[1] if (found := LAYER.search(tensor.name)) else ""] += prod(tensor.shape)
    others = by_layer.pop("", 0)
    outside = [tensor.shape for tensor in layout.tensors if not LAYER.search(tensor.name) and len(tensor.shape) > 1]
    vocabulary, width = max(outside, key=prod, default=(1, 1))[:2]
    return Shape(
        parameters=others + by_layer.total(),
        layer_parameters=max(by_layer.values(), default=0),
        other_parameters=others,
        layers=max(1, len(by_layer)),
        vocab_size=_number(config, "vocab_size") or vocabulary,
        **widths(partial(_number, config), width),
        rounded=sum(prod(tensor.shape) for tensor in layout.tensors if is_rounded(tensor)),
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


def sample_tokens(shape: Shape, options: EngineOptions) -> int:
    """Return the tokens of a sample that has a place: what the owner allows, at most what the run and the model do."""
    tokens = options.max_model_len or ASSUMED_SAMPLE_TOKENS
    return min(tokens, options.sample_tokens or tokens, shape.context_tokens or tokens)


def places(shape: Shape, device: Device, options: EngineOptions) -> int:
    """Return how many samples to draw side by side: as many as fit with the weights, at most those asked for. Raise
    UserError if there is no room for a few."""
    held = weights_bytes(shape, device.dtype, options.precision)
    tokens = sample_tokens(shape, options)
    one = sample_bytes(shape, tokens, device.dtype)
    count, few = int((device.free_bytes - held) * device.share) // one, min(options.places or FEW, FEW)
    if count >= few:
        return min(options.places or device.max_places, count)
    changes = [
        "--precision bfloat16" if device.dtype == "float32" and options.precision == "none" else "",
        device.lighter,
        f"--batch-samples {count}" if count > 0 else "",
        "a smaller --max-model-len, end what else runs there, or help with --role relay",
    ]
    raise UserError(
        f"too little memory: {device.where} has {size(device.free_bytes)} free, and the swarm's model takes "
        f"{size(held)} in {device.dtype if options.precision == 'none' else options.precision}, with {few} "
        f"sample{'' if few == 1 else 's'} of {tokens:,} tokens and {size(one / device.share)} each; "
        f"change: {', '.join(filter(None, changes))}"
    )


def reckon(kind: EngineKind, layout: Layout, options: EngineOptions) -> Reckoned:
    """Return how many samples fit here, and what is said of that. Raise UserError if there is no room for a few."""
    shape = shape_of_layout(layout)
    device = measured(kind, options, shape.parameters)
    if device.dtype == "float16" and kind != "vllm" and any(spec.dtype == "BF16" for spec in layout.tensors):
        raise UserError(
            "float16 does not hold the swarm's bfloat16 weights exactly, so they could never be proven: "
            "choose --precision bfloat16 or float32"
        )
    other = adapters_bytes(layout, options, device.dtype) if kind == "vllm" else 0
    if kind == "mlx":
        # An install holds all experts as they came next to those that it had, until they are stacked.
        other = sum(tensor.nbytes for tensor in layout.tensors if len(tensor.shape) > 2)
    lighter = "" if layout.adapter is not None and kind != "mlx" else device.lighter
    device = dataclasses.replace(device, free_bytes=device.free_bytes - other, lighter=lighter)
    count, tokens = places(shape, device, options), sample_tokens(shape, options)
    held = weights_bytes(shape, device.dtype, options.precision)
    return Reckoned(
        places=count,
        dtype=device.dtype,
        context_tokens=min(filter(None, (options.max_model_len, shape.context_tokens)), default=0),
        said=f"room: {size(device.free_bytes)} free on {device.where}, of which the engine's weights take "
        f"{size(held)} and up to {count} samples of {tokens:,} tokens "
        f"{size(count * sample_bytes(shape, tokens, device.dtype))}",
    )


# -- reading -----------------------------------------------------------------------------------------------------


def measured(kind: EngineKind, options: EngineOptions, parameters: int) -> Device:
    """Ask this machine what is free where an engine of this kind would run a model of that size now."""
    if kind == "mlx":
        return _measured_for_mlx(options)
    import torch

    from swarm.models.device import is_cpu_fast_in_half, pick_device

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
        max_places=GPU_PLACES if is_gpu else CPU_PLACES,
        dtype=dtype_of(options, is_gpu=is_gpu or (not is_vllm and is_cpu_fast_in_half(device, parameters))),
        lighter=LIGHTER[is_vllm] if is_gpu or is_vllm else "",
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
        max_places=CPU_PLACES,
        dtype=auto if options.dtype == "auto" else options.dtype,
        lighter="--precision int4",
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
