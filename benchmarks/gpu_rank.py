"""A part of the check of a GPU that no other benchmark has: a learner step of one rank under torchrun.

bin/python -m benchmarks.gpu_rank

It runs with FSDP2 (NCCL on CUDA) in bf16 mixed precision, and is compared with the same step without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from swarm.learner.messages import Train, TrainerConfig
from swarm.learner.trainer import Trainer
from swarm.process import NoParent
from tests.unit.trainers import group, trainer_in

RANK_S = 240.0  # Of the process under torchrun, with its imports
BATCH = (group([0.0, 1.0, 0.5]), group([1.0, 0.5, 0.0]))


def rank(device: torch.device) -> dict[str, float]:
    """How far the figures of a step are apart, with and without torchrun."""
    with tempfile.TemporaryDirectory(prefix="echo-node-rank-") as directory:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        own = ["-m", "benchmarks.gpu_rank", "--device", str(device), "--directory", directory]
        done = subprocess.run([sys.executable, *command, *own], capture_output=True, text=True, timeout=RANK_S)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        found = json.loads(done.stdout.strip().splitlines()[-1])
        alone = _step(trainer_in(Path(directory) / "alone", device=str(device), precision="bfloat16"))
    return {
        "backend_is_nccl": float(found["backend"] == "nccl"),
        "gathers_in_bf16": float(found["gathers_in_bf16"]),
        "loss_apart": abs(found["loss"] - alone["loss"]),
        "grad_norm_apart": abs(found["grad_norm"] / alone["grad_norm"] - 1),
    }


def under_torchrun(device: str, directory: Path) -> dict[str, Any]:
    from swarm.learner.sharded import Sharded

    ranks = Sharded()
    config = TrainerConfig(
        run_dir=directory,
        # Under torchrun each rank has its own GPU.
        device="auto" if device.startswith("cuda") else device,
        warmup_steps=1,
        precision="bfloat16",
    )
    trainer = Trainer(config, NoParent(), ranks)
    figures = _step(trainer)
    assert ranks._mesh is not None
    backend = torch.distributed.get_backend(ranks._mesh.get_group())
    return figures | {"backend": backend, "gathers_in_bf16": trainer._learning.policy.module.weights_in_half}


def _step(trainer: Trainer) -> dict[str, Any]:
    trainer.prepared()
    return trainer.step(Train(step=0, groups=BATCH)).metrics


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--directory", type=Path, help="set under torchrun alone")
    options = parser.parse_args(arguments)
    if options.directory is None:
        print(json.dumps(rank(torch.device(options.device))), flush=True)
        return 0
    print(json.dumps(under_torchrun(options.device, options.directory)), flush=True)
    # torch's threads may outlive the group of processes.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
