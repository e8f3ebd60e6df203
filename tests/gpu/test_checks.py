"""What `bin/gpu-check` runs: on CUDA each check within its limits, on the CPU the same lines with a tiny model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_check import CHECKS, DRY_FACTOR, Check, run

IN_A_SUBMISSION = frozenset({"mfu-0.6b"})
"""On a CPU the others run what these do, or what the rings vllm and integration do."""


def marked(check: Check) -> pytest.ParameterSet:
    length = pytest.mark.slow if check.name in IN_A_SUBMISSION else pytest.mark.long
    return pytest.param(check, id=check.name, marks=[length, pytest.mark.timeout(DRY_FACTOR * check.limit_s + 30)])


@pytest.mark.parametrize("check", [marked(check) for check in CHECKS])
def test_a_check_keeps_to_its_limits(check: Check, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = run(check, dry=device.type == "cpu")
    if found.outcome == "skipped":
        pytest.skip(found.line)
    assert found.outcome == "met", f"{found.line}\n{found.said}"
