"""How fast a real model learns with which settings: the learner's own step and the transformers engine in one process.

    bin/python -m benchmarks.settings --model DIR --to FILE.jsonl steps=60 learning_rate=1e-5 minibatches=1 seed=0

The settings are those of examples/smollm2.toml with the given ones in place of its own. Nothing is between learner and
engine but a fixed staleness (benchmarks/learning_forced.py): what a step trains on was drawn with the weights of
`max_staleness` steps before, as they are published. So cases differ by their settings alone, and take less time than a
swarm. Each case is a line: its settings, held-out accuracy by step (greedy), figures of every step, and the CPU seconds
of its parts. With --keep DIR every published version is kept, for `benchmarks.codec --real DIR`; of SmolLM2-135M one
has 269 MB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.learning_forced import OneProcess
from swarm.settings import LeadConfig
from swarm.settings_file import load_config, read_settings

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2.toml"
SHOWN = ("reward", "frac_reward_zero_std", "grad_norm", "optimizer_steps_skipped", "mismatch_kl", "entropy", "loss")
HELD_OUT = 1000  # More than there are


def config_of(model: str, changes: Sequence[str]) -> LeadConfig:
    """The example's settings with `changes`, each NAME=VALUE. UserError for one that does not exist."""
    values = read_settings(LeadConfig, EXAMPLE)
    del values["target"]
    values |= {"model": model, "task": f"jsonl:{EXAMPLE.parent / 'sums.jsonl'}", "eval_prompts": HELD_OUT}
    return load_config(LeadConfig, None, values | {"device": "cpu"} | dict(one.split("=", 1) for one in changes))


def run(config: LeadConfig, versions: Path | None = None) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        process = OneProcess(config, Path(directory))
        held_out = {0: process.accuracy()}
        figures: list[dict[str, float]] = []
        for step in range(config.steps):
            trained = process.train(step)
            alarms = {f"alarm/{one.kind}": one.value for one in trained.alarms}
            figures.append({name: trained.metrics[name] for name in SHOWN if name in trained.metrics} | alarms)
            if versions is not None:
                _save(process, versions / str(step + 1))
            if (step + 1) % config.eval_every_steps == 0:
                held_out[step + 1] = process.accuracy()
                print(f"{step + 1:4} held-out {held_out[step + 1]:.3f} {figures[-1]}", flush=True)
    rows = {name: [round(one.get(name, 0.0), 4) for one in figures] for name in {n for one in figures for n in one}}
    return {
        "held_out": held_out,
        "cpu_s_per_step": {part: round(spent_s / config.steps, 3) for part, spent_s in process.spent_s.items()},
        "wall_s": round(time.monotonic() - began, 1),
        "figures": rows,
    }


def _save(process: OneProcess, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    save_file({spec.name: tensor for spec, tensor in process.newest.tensors.items()}, to / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where every version is kept, if one is named")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = run(config_of(options.model, options.settings), options.keep)
    with options.to.open("a") as file:
        file.write(json.dumps({"settings": options.settings, **found}) + "\n")


if __name__ == "__main__":
    main()
