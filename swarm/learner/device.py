"""Where a model runs and how much memory is left there; the dtypes of tensors in torch's words."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

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
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def stream_dtype(tensor: torch.Tensor) -> Dtype:
    """The dtype of a tensor in the stream: every float is published as bf16, everything else as it is."""
    return "BF16" if tensor.is_floating_point() else _NAMES[tensor.dtype]


def pick_device(wanted: str) -> torch.device:
    """`auto` is the first CUDA device if there is one. UserError if `wanted` is not a device of this machine."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--device {wanted} cannot be used here ({reason}); auto, cpu or cuda:0 may be") from error
    return device


def free_host_bytes() -> int:
    """What programs may still take of this machine's memory without swapping, and of their control group (version 2 or
    1) if it has a limit. Cached files do not count as taken. All of the memory where the system does not say."""
    found = []
    for group, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            cached = re.search(r"^inactive_file (\d+)$", Path(group, "memory.stat").read_text(), re.MULTILINE)
            found.append(
                int(Path(group, limit).read_text())
                - int(Path(group, used).read_text())
                + int(cached[1] if cached else 0)
            )
        except (OSError, ValueError):
            # No such group, or no limit ("max").
            continue
    try:
        available = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        available = None
    # Pages that are free (SC_AVPHYS_PAGES) would not do: on a machine that has run for a while files fill nearly all.
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([*found, int(available[1]) * 1024 if available else whole])
