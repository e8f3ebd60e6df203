"""The ring of GPUs. Each of its tests runs on the CPU too, so that none of its lines is first tried on a lent card."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return torch.device(request.param)
