"""Parts of the check of a GPU that no other benchmark has: copies to the host, and a rank under torchrun.

bin/python -m benchmarks.gpu_parts copies --parameters 4e9
bin/python -m benchmarks.gpu_parts rank

Copies: the weights of a model cast into the staging file, and the copy that a checkpoint is written from (weights and
AdamW's moments in float32), in GB/s, beside what one pinned buffer of 256 MiB takes over the bus in the same process.
Rank: a learner step of one rank under torchrun, with FSDP2 (NCCL on CUDA) in bf16 mixed precision, beside the same step
without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.sampler_models import REAL_VOCABULARY, Size, random_model
from swarm.learner.checkpoint.model_files import stream_tensors, write_staging
from swarm.learner.checkpoint.saving import take
from swarm.learner.messages import Train, TrainerConfig
from swarm.learner.optimizer import adamw
from swarm.learner.policy import Policy
from swarm.learner.ranks import Ranks
from swarm.learner.trainer import Trainer
from swarm.learner.update import Learning
from swarm.process import NoParent
from tests.unit.trainers import group, trainer_in

BUS_BYTES = 256 << 20
RANK_S = 240.0  # Of the process under torchrun, with its imports
IN_BF16 = TrainerConfig(precision="bfloat16")
BATCH = (group([0.0, 1.0, 0.5]), group([1.0, 0.5, 0.0]))


def copies(device: torch.device, parameters: float) -> dict[str, float]:
    """Seconds and GB/s, after one round that makes pages."""
    size = Size(parameters=parameters, vocab_size=REAL_VOCABULARY if parameters > 1e8 else 1024)
    model = random_model(size, device=str(device))
    optimizer = adamw(model, 1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors = stream_tensors(model)
    parts = Learning(
        model=model,
        optimizer=optimizer,
        shuffle=torch.Generator(),
        policy=Policy(model, TrainerConfig(), temperature=1.0),
        reference=None,
        ranks=Ranks(),
        device=device,
        progress=lambda: None,
    )
    with tempfile.TemporaryDirectory(prefix="echo-node-copies-") as directory:
        staging = Path(directory) / "staging.bin"

        def checkpoint() -> None:
            take(parts, step=1, lineage=b"")

        for _ in range(2):
            stage_s = _seconds(device, lambda: write_staging(tensors, staging))
            checkpoint_s = _seconds(device, checkpoint)
    nbytes = sum(spec.nbytes for spec in tensors)
    bus = _bus_bytes_per_s(device)
    return {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "stage_s": stage_s,
        "checkpoint_s": checkpoint_s,
        "stage_gb_per_s": nbytes / stage_s / 1e9,
        "checkpoint_gb_per_s": 6 * nbytes / checkpoint_s / 1e9,
        "bus_gb_per_s": bus / 1e9,
        "stage_share_of_bus": nbytes / stage_s / bus,
        "checkpoint_share_of_bus": 6 * nbytes / checkpoint_s / bus,
    }


def _bus_bytes_per_s(device: torch.device) -> float:
    here = torch.ones(BUS_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return BUS_BYTES / min(_seconds(device, lambda: there.copy_(here, non_blocking=True)) for _ in range(5))


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    began = _now(device)
    work()
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def rank(device: torch.device) -> dict[str, float]:
    """How far the figures of a step are apart, with and without torchrun."""
    with tempfile.TemporaryDirectory(prefix="echo-node-rank-") as directory:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        own = ["-m", "benchmarks.gpu_parts", "under-torchrun", "--device", str(device), "--directory", directory]
        done = subprocess.run([sys.executable, *command, *own], capture_output=True, text=True, timeout=RANK_S)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        found = json.loads(done.stdout.strip().splitlines()[-1])
        alone = _step(trainer_in(Path(directory) / "alone", device=str(device), compute=IN_BF16))
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
    parser.add_argument("part", choices=("copies", "rank", "under-torchrun"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parameters", type=float, default=4e9)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    match options.part:
        case "copies":
            found: dict[str, Any] = copies(device, options.parameters)
        case "rank":
            found = rank(device)
        case _:
            found = under_torchrun(options.device, options.directory)
    print(json.dumps(found), flush=True)
    if options.part == "under-torchrun":
        # torch's threads may outlive the group of processes.
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
