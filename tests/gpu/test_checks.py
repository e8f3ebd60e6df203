"""What `bin/gpu-check` runs: on CUDA each check within its limits, on the CPU the same lines with a tiny model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_check import CHECKS
from benchmarks.gpu_run import DRY_FACTOR, Check, run


def marked(number: int, check: Check) -> pytest.ParameterSet:
    """The first of each kind is part of a submission: on a CPU the others of a kind run nearly the same lines."""
    is_long = check.name.partition("-")[0] in [other.name.partition("-")[0] for other in CHECKS[:number]]
    marks = [pytest.mark.long if is_long else pytest.mark.slow, pytest.mark.timeout(DRY_FACTOR * check.limit_s + 30)]
    return pytest.param(check, id=check.name, marks=marks)


@pytest.mark.parametrize("check", [marked(*numbered) for numbered in enumerate(CHECKS)])
def test_a_check_keeps_to_its_limits(check: Check, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = run(check, dry=device.type == "cpu")
    if found.outcome == "skipped":
        pytest.skip(found.line)
    assert found.outcome == "met", f"{found.line}\n{found.said}"
