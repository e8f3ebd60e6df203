"""Which engine a sampler uses. This imports no library: importing torch alone would take seconds."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from swarm.errors import UserError
from swarm.extras import how_to_have
from swarm.sampler.engine import EngineKind
from swarm.sampler.vllm import versions as vllm_versions
from swarm.sampler.vllm.versions import dotted

MIN_COMPUTE = (8, 0)  # From this compute capability on a GPU has bf16; an older one can be requested by name
NVIDIA_SMI_S = 15.0  # An unused driver takes seconds to wake up, some for each GPU
NO_GPU = "no GPU that vLLM supports was found"
MLX = ((0, 32, 2), (0, 33))  # The lowest supported version of mlx-lm, and the first unsupported one
GPU_LINE = re.compile(r"\s*(\d+), (\S+), (.+), (\d+)\.(\d+)\s*")
"""Of nvidia-smi: number, UUID, name and compute capability, for which a driver too old to know it says [N/A]."""

MLX_BUILD = how_to_have("mlx")
GPU_BUILD = f"{how_to_have('vllm')}; or bin/setup --engine vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEngine:
    """An engine, and briefly why this one."""

    kind: EngineKind
    why: str

    @property
    def line(self) -> str:
        return f"engine: {self.kind} ({self.why})"


class Gpu(NamedTuple):
    name: str
    compute: tuple[int, int]


def choose_engine(wanted: Literal["auto"] | EngineKind, device: str = "auto") -> ChosenEngine:
    """Choose for `auto` vLLM if there is a GPU and a supported release of vLLM, mlx likewise on Apple silicon, else
    transformers. Block for at most NVIDIA_SMI_S. Raise UserError, with the command that installs it, if an engine is
    requested by name and missing."""
    match wanted:
        case "auto":
            return _best(device)
        case "vllm":
            vllm_versions.check()
            return ChosenEngine(kind="vllm", why=f"as asked, {gpu_build() or 'its CPU build'}")
        case "mlx":
            if (fault := mlx_fault()) is not None:
                raise UserError(fault)
            return ChosenEngine(kind="mlx", why=f"as asked, mlx-lm {vllm_versions.installed('mlx-lm')}")
    return ChosenEngine(kind=wanted, why="as asked")


def _best(device: str) -> ChosenEngine:
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return _best_of_a_mac(device)
    if ":" in device:
        return ChosenEngine(
            kind="transformers", why=f"{device} was asked for; vLLM takes what CUDA_VISIBLE_DEVICES shows it"
        )
    gpu = NO_GPU if device == "cpu" else find_gpu()
    if isinstance(gpu, str):
        why = gpu
    elif gpu.compute < MIN_COMPUTE:
        why = f"{gpu.name} has compute capability {dotted(gpu.compute)}; vLLM is taken from {dotted(MIN_COMPUTE)} on"
    elif (vllm := gpu_build()) is None:
        why = f"{gpu.name} is here, but vllm is not installed: {GPU_BUILD}"
    elif (fault := vllm_versions.fault()) is not None:
        why = fault
    else:
        return ChosenEngine(kind="vllm", why=f"{gpu.name}, {vllm}")
    return ChosenEngine(kind="transformers", why=why)


def _best_of_a_mac(device: str) -> ChosenEngine:
    if device != "auto":
        return ChosenEngine(
            kind="transformers", why=f"{device} was asked for; --engine mlx draws faster on this Mac's GPU"
        )
    if (fault := mlx_fault()) is not None:
        return ChosenEngine(kind="transformers", why=f"on the CPU: {fault}")
    return ChosenEngine(kind="mlx", why=f"Apple silicon, mlx-lm {vllm_versions.installed('mlx-lm')}")


def mlx_fault() -> str | None:
    """Return why echo-node cannot use this machine's mlx-lm and what to do, or None if it can."""
    found = vllm_versions.installed("mlx-lm")
    if found is not None and vllm_versions.within(found, *MLX):
        return None
    least, below = map(dotted, MLX)
    return f"the mlx engine needs mlx-lm >={least},<{below}; here: {found or 'not installed'}; {MLX_BUILD}"


def gpu_build() -> str | None:
    """Return the name and version of vLLM's own build, which is for GPUs, or None if it is not installed."""
    version = vllm_versions.installed("vllm")
    return version and f"vllm {version}"


def find_gpu() -> Gpu | str:
    """Return the first GPU that this process may use, or why there is none. Block for at most NVIDIA_SMI_S."""
    found = find_gpus()
    return found if isinstance(found, str) else next(iter(found.values()), NO_GPU)


def find_gpus() -> dict[str, Gpu] | str:
    """Return the GPUs that this process may use by number, in CUDA's order, or why there is none, as `find_gpu`."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=NVIDIA_SMI_S, check=True)
    except FileNotFoundError:
        if not Path("/proc/driver/nvidia/gpus").exists():
            return NO_GPU
        return "there is an NVIDIA GPU, but no nvidia-smi that says which; --engine vllm takes it"
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {NVIDIA_SMI_S:.0f} s"
    except (subprocess.CalledProcessError, OSError):
        return NO_GPU
    rows = filter(None, map(GPU_LINE.fullmatch, done.stdout.decode(errors="replace").splitlines()))
    found = {row[1]: (row[2], Gpu(name=row[3], compute=(int(row[4]), int(row[5])))) for row in rows}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return {number: gpu for number, (_, gpu) in found.items()}
    # nvidia-smi ignores this variable, which may name numbers or the beginnings of UUIDs, in the order of CUDA.
    wanted = filter(None, re.split("[, ]+", named))
    matching = ((at, gpu) for one in wanted for at, (uuid, gpu) in found.items() if one == at or uuid.startswith(one))
    return dict(matching)
