"""A rank that steps AdamW over its rows, for tests/integration/test_optimizer_ranks.py: `DIRECTORY` has the whole
parameters and gradients, and gets what all ranks have then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from swarm.learner.optimizer import AdamW


def main(directory: Path, states: Any) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = load_file(directory / "given.safetensors")
    parameters = {
        name: torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)]))
        for name, tensor in given.items()
        if not name.startswith("gradient/")
    }
    optimizer = AdamW(parameters.values(), states, lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        for name, parameter in parameters.items():
            parameter.grad = distribute_tensor(given[f"gradient/{name}"], mesh, [Shard(0)])
        optimizer.step()
    found = dict(parameters) | {
        f"{kind}/{name}": tensor for name, p in parameters.items() for kind, tensor in optimizer.state[p].items()
    }
    whole = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().contiguous() for name, t in found.items()
    }
    if dist.get_rank() == 0:
        save_file(whole, directory / f"{states}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
