"""Ranks that share rows step them as one rank does, bit for bit, wherever moments are: no block of 8 bits has rows of
two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.learner.optimizer import BLOCK, AdamW
from swarm.types import OptimizerStates

pytestmark = pytest.mark.slow

SHAPES = {"even": (32, BLOCK), "odd": (33, 2 * BLOCK), "fewer": (1, 16 * BLOCK), "parts": (34, 304), "small": (32,)}
"""A CPU's vectors are 16 elements: what is left over is computed one by one, and its last bit may differ."""


@pytest.mark.parametrize(
    "states", [pytest.param("float32", marks=pytest.mark.long), pytest.param("8bit", marks=pytest.mark.long), "host"]
)
def test_two_ranks_step_as_one(tmp_path: Path, states: OptimizerStates) -> None:
    torch.manual_seed(0)
    given = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    given |= {f"gradient/{name}": 1e-3 * torch.randn(shape) for name, shape in SHAPES.items()}
    save_file(given, tmp_path / "given.safetensors")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    rank = [*torchrun, "-m", "tests.integration.stepping_rank", str(tmp_path), states]
    subprocess.run(rank, check=True, timeout=300)

    parameters = {name: torch.nn.Parameter(given[name].clone()) for name in SHAPES}
    optimizer = AdamW(parameters.values(), states, lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        for name, parameter in parameters.items():
            parameter.grad = given[f"gradient/{name}"]
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in parameters.items()} | {
        f"{kind}/{name}": tensor for name, p in parameters.items() for kind, tensor in optimizer.state[p].items()
    }
    found = load_file(tmp_path / f"{states}.safetensors")
    assert found.keys() == expected.keys()
    assert ("exp_avg_scale/odd" in found) == (states == "8bit")
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
