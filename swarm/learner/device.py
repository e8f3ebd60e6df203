"""Where a model runs."""

from __future__ import annotations

import torch

from swarm.errors import UserError

SMALL_MODEL_PARAMETERS = 10_000_000
"""Below this a second thread or a second micro-batch costs more in overhead than it brings."""


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
