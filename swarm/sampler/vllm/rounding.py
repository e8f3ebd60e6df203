"""What vLLM is given in place of a matrix that it holds rounded, and what it then computes with.

The form is that of compressed-tensors checkpoints, which vLLM's builds for GPUs and for CPUs both load and pack for
their kernels: signed numbers and a scale for each row (int8, fp8) or for each 32 numbers of a row (int4). With int8 and
fp8 the kernels also round what a matrix is multiplied with, each token by itself. A row is rounded without regard to
any other, so it does not matter how vLLM fuses matrices, or deals their rows out to several workers.
"""

from __future__ import annotations

from typing import Any

import torch

from swarm.broadcast.version.manifest import Layout
from swarm.errors import UserError
from swarm.sampler.room import is_rounded
from swarm.types import Rounding

GROUP = 32  # Numbers that share a scale in int4: divides the widths of all known models, and those of their shards
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
ROUNDS_INPUTS: tuple[Rounding, ...] = ("fp8", "int8")
MIN_SCALE = 1e-12  # Of a row of zeros


def overrides(precision: Rounding) -> dict[str, Any]:
    """Return what a checkpoint's config.json says of this form. Embeddings and the head are not rounded."""
    if precision == "none":
        return {}
    kind = {"num_bits": 4 if precision == "int4" else 8, "type": "float" if precision == "fp8" else "int"}
    by = {"strategy": "group", "group_size": GROUP} if precision == "int4" else {"strategy": "channel"}
    inputs = None if precision == "int4" else {**kind, "symmetric": True, "strategy": "token", "dynamic": True}
    formats = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}
    scheme = {"weights": {**kind, **by, "symmetric": True, "dynamic": False}, "input_activations": inputs}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": formats[precision],
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"all": {"targets": ["Linear"], **scheme}},
        }
    }


def check(layout: Layout, precision: Rounding, *, is_cuda: bool) -> None:
    """Raise UserError if vLLM cannot hold the matrices of `layout` in this precision."""
    rounded = [spec for spec in layout.tensors if is_rounded(spec)]
    if any(len(spec.shape) > 2 for spec in rounded):
        raise UserError("--precision cannot round a model of experts here yet: leave it out")
    if precision == "int4" and (odd := [spec for spec in rounded if spec.shape[1] % GROUP]):
        raise UserError(f"--precision int4 wants rows of whole {GROUP}s, unlike {odd[0].name}: take int8")
    if precision == "int4" and not (is_cuda or torch.cpu._is_avx512_supported()):
        raise UserError("--precision int4 needs a GPU, or a processor with AVX-512, which this one lacks: take fp8")


def round_matrix(matrix: torch.Tensor, precision: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers (or fp8) in the matrix's shape, and the scales [rows, 1 or groups]: float32, but of bf16's
    precision for int4, where vLLM holds them in its own dtype."""
    rows, columns = matrix.shape
    grouped = matrix.float().view(rows, -1, GROUP if precision == "int4" else columns)
    scales = (grouped.abs().amax(-1) / LARGEST[precision]).clamp(min=MIN_SCALE)
    if precision == "int4":
        scales = scales.bfloat16().float()
    scaled = grouped / scales[..., None]
    if precision == "fp8":
        return scaled.to(torch.float8_e4m3fn).view(rows, columns), scales
    held = scaled.round().clamp(-LARGEST[precision], LARGEST[precision]).to(torch.int8)
    return held.view(rows, columns), scales


def loaded(name: str, matrix: torch.Tensor, precision: Rounding) -> dict[str, torch.Tensor]:
    """Return what a checkpoint has in place of `matrix`, whose name ends in ".weight"."""
    held, scales = round_matrix(matrix, precision)
    if precision != "int4":
        return {name: held, f"{name}_scale": scales}
    # Eight numbers in an int32, the first in the lowest bits, each 8 too large.
    words = (held.int() + 8).view(held.shape[0], -1, 8) << torch.arange(0, 32, 4, dtype=torch.int32)
    packed = words.sum(-1, dtype=torch.int32)
    shape = torch.tensor(matrix.shape)
    return {f"{name}_packed": packed, f"{name}_scale": scales.to(matrix.dtype), f"{name}_shape": shape}


def computed_with(matrix: torch.Tensor, precision: Rounding) -> torch.Tensor:
    """Return in float32 what the rounded `matrix` stands for. With int4 the kernels round that to bf16 once more."""
    held, scales = round_matrix(matrix, precision)
    meant = (held.float().view(*scales.shape, -1) * scales[..., None]).view(matrix.shape)
    return meant.bfloat16().float() if precision == "int4" else meant


def rounded_inputs(inputs: torch.Tensor, precision: Rounding) -> torch.Tensor:
    """Return what a kernel sees of `inputs` [..., width]."""
    if precision not in ROUNDS_INPUTS:
        return inputs
    return computed_with(inputs.reshape(-1, inputs.shape[-1]), precision).view(inputs.shape)
