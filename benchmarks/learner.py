"""Speed and memory of a learner step.

bin/python -m benchmarks.learner --json

Seconds on the CPU are those of the process, on one thread: what else runs on the machine counts little.

Speed: tokens/s of ours, padded and packed, against the bare transformers step of benchmarks/learner_step.py, which
pads, in turns in the same process, medians of the repeats. `mixed` are completions of 16 to 240 tokens, where ours puts
rows of like length together; `alike` are rows of one length with one token of prompt, where nothing can be gained by
that. On the CPU there is no flash attention: packed rows are kept apart by a mask of all pairs, which costs more the
longer a line is, and is why packing is not chosen there.
Memory: peak of two steps, each variant in a process of its own, over the bytes of the weights.
Reckoned: what real models take by the preflight's arithmetic, GiB of a GPU + of the host, MB of a version.
MFU: model FLOP/s utilisation in bf16 of a model of 0.6 billion parameters, `--parameters 1.7e9` of another, or with
another kernel of attention (`--attention flash_attention_2`); on CUDA, and in a quick run.
`--device cuda` measures memory there, of the same model; `--variants` some of how it is taken.
Each part is a line of JSON. Publishing is measured by benchmarks/version.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import torch

from benchmarks import reckoned
from benchmarks.learner_step import VARIANTS, Peak, Variant, Work, bare_step, our_step, rules_of, tokens_of
from swarm.learner.memory import fit, read_free_bytes, shape_of
from swarm.learner.messages import TrainerConfig
from swarm.learner.policy import Policy
from swarm.models.memory import GIB, Shape

SPEED_TARGET = 0.9
ESTIMATE_TARGET = 0.25
"""How far the preflight's estimate may be from the measured peak."""

SPEED = Work(
    parameters=2e7, vocab_size=32_768, groups=1, group_size=8, prompt_tokens=16, least=16, most=240,
    micro_batch_tokens=1024,
)  # fmt: skip
ALIKE = replace(SPEED, prompt_tokens=1, least=127, most=127)
MEMORY = replace(SPEED, parameters=1e7, vocab_size=65_536, least=200, micro_batch_tokens=2048)
QUICK = Work(
    parameters=3e5, vocab_size=512, groups=1, group_size=4, prompt_tokens=4, least=4, most=12, micro_batch_tokens=64
)
CUDA = Work(
    parameters=6e8, vocab_size=151_936, groups=8, group_size=16, prompt_tokens=256, least=768, most=1024,
    micro_batch_tokens=16_384, device="cuda",
)  # fmt: skip
MEMORY_ON_CUDA = replace(CUDA, groups=2)
LARGE_CARD = 60 * GIB  # One that holds a step of MEMORY_ON_CUDA, 50 GiB; a quarter of its tokens take 20

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16 of a device, by a part of its name, from the vendor's data sheets. Of any other its largest product of
matrices is measured, which flatters it by a fifth or so."""

PRODUCT_WIDTH = 8192  # A square product of 1.1 TFLOP: large enough to reach what a device can, and 0.01 s of it

PROCESS_S = 1800.0
"""Longest time for one process of the memory part; a loaded machine took 200 s."""


def speed(work: Work, repeats: int) -> dict[str, float]:
    """Tokens/s of ours, padded and packed, and of the bare step, and ratios to that, medians over alternating
    repeats."""
    rules = rules_of("chunked", work)
    packed = rules.model_copy(update={"packing": True})
    steps = {
        "ours": our_step(work, work.model(), rules),
        "packed": our_step(work, work.model(), packed),
        "bare": bare_step(work, work.model(), rules),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        groups = work.rollouts(repeat)
        for name in sorted(steps, reverse=bool(repeat % 2)):
            took = steps[name](groups)
            if repeat:
                # The first makes AdamW's moments and warms the caches.
                seconds[name].append(took / tokens_of(groups))
    found = {f"{name}_tokens_per_s": 1 / statistics.median(took) for name, took in seconds.items()}
    for name, prefix in (("ours", ""), ("packed", "packed_")):
        pairs = [bare / ours for ours, bare in zip(seconds[name], seconds["bare"], strict=True)]
        found |= {
            f"{prefix}ratio": statistics.median(pairs),
            f"least_{prefix}ratio": min(pairs),
            f"most_{prefix}ratio": max(pairs),
        }
    return found


def peak(variant: Variant, work: Work) -> Peak:
    """Measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.learner_step", variant, msgspec.json.encode(work).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROCESS_S)
    return Peak(**json.loads(done.stdout.strip().splitlines()[-1]))


def flops_per_token(shape: Shape, context: float) -> float:
    """Forward and backward of one token that sees `context` others: 6 of each weight that multiplies, and 12 of each
    element of queries in each layer (the appendix of PaLM), halved since attention is causal."""
    embedding = shape.vocab_size * shape.hidden
    return 6 * (shape.parameters - embedding) + 6 * embedding + 6 * shape.layers * shape.queries * context


def utilisation(work: Work, repeats: int, *, attention: str = "") -> dict[str, float]:
    """Model FLOP/s over the peak of the device; recomputed layers and filling are not counted as work. The
    micro-batches are those that the preflight chooses. The first step is not counted."""
    model = work.model()
    if attention:
        model.set_attn_implementation(attention)
    shape, device = shape_of(model), torch.device(work.device)
    asked = TrainerConfig(packing="flash" in attention)
    policy, longest = Policy(model, asked, temperature=1.0), work.prompt_tokens + work.most
    free = read_free_bytes(device, ranks=1)
    rules = fit(policy, asked, device, free, ranks=1, longest=longest, kl=False)
    step = our_step(work, model, rules)
    step(work.rollouts(0))
    rates = []
    for seed in range(1, repeats + 1):
        groups = work.rollouts(seed)
        rates.append(tokens_of(groups) / step(groups))
    rate = statistics.median(rates)
    most = peak_flops(device)
    mfu = rate * flops_per_token(shape, work.prompt_tokens + (work.least + work.most) / 2) / most
    return {
        "tokens_per_s": rate,
        "parameters": float(shape.parameters),
        "tokens_at_a_time": float(rules.tokens_per_micro_batch or 0),
        "recomputes_layers": float(bool(rules.activation_checkpointing)),
        "peak_flops": most,
        "mfu": mfu,
    }


def memory_on_cuda() -> Work:
    is_large = torch.cuda.get_device_properties(0).total_memory >= LARGE_CARD
    return MEMORY_ON_CUDA if is_large else replace(MEMORY_ON_CUDA, micro_batch_tokens=4096)


def peak_flops(device: torch.device) -> float:
    """Dense bf16 of a device by its name, or as a product of large matrices shows it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    for part, flops in PEAK_FLOPS.items():
        if part in name:
            return flops
    width = PRODUCT_WIDTH if device.type == "cuda" else 256
    one = torch.ones(width, width, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        # Reading an item waits for the product.
        float((one @ one)[0, 0])
        seconds.append(time.perf_counter() - began)
    return 2 * width**3 / min(seconds)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All parts that were asked for, said as they come."""
    quick, repeats = options.quick, 1 if options.quick else options.repeats
    figures: dict[str, Any] = {"load_average": os.getloadavg()[0], "threads": torch.get_num_threads()}
    if "speed" in options.parts:
        for name, work in (("mixed", SPEED), ("alike", ALIKE)):
            figures[name] = _said({"speed": name, **speed(QUICK if quick else work, repeats)})
    if "memory" in options.parts:
        figures["memory"] = []
        work = QUICK if quick else MEMORY if options.device == "cpu" else memory_on_cuda()
        # Logits of all tokens at once are many gigabytes of a real vocabulary.
        for variant in options.variants or (VARIANTS[:-1] if options.device == "cpu" else VARIANTS[2:]):
            of = peak(variant, work)
            figures["memory"].append(
                _said({**asdict(of), "per_model_byte": of.per_model_byte, "estimate_ratio": of.estimate_ratio})
            )
    if "reckoned" in options.parts:
        figures["reckoned"] = reckoned.rows(("0.6B",) if quick else tuple(reckoned.MODELS))
        print("\n".join(reckoned.lines(figures["reckoned"])), flush=True)
    if "mfu" in options.parts and (quick or torch.cuda.is_available()):
        work = QUICK if quick else replace(CUDA, parameters=options.parameters)
        figures["mfu"] = _said(utilisation(work, repeats, attention=options.attention))
    return figures


def _said(figures: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(figures), flush=True)
    return figures


def met(figures: dict[str, Any]) -> bool:
    """Every target of what was measured."""
    speeds = [figures["mixed"][name] >= SPEED_TARGET for name in ("ratio", "packed_ratio") if "mixed" in figures]
    estimates = [
        abs(of["estimate_ratio"] - 1) <= ESTIMATE_TARGET for of in figures.get("memory", ()) if of["variant"] != "bare"
    ]
    return all(speeds) and all(estimates)


PARTS = ("speed", "memory", "reckoned", "mfu")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=_names, default=PARTS, help=",".join(PARTS))
    parser.add_argument("--variants", type=_names, help=f"of memory: {','.join(VARIANTS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parameters", type=float, default=6e8, help="of the model on CUDA")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where memory is measured")
    parser.add_argument("--attention", default="", help="of the MFU: transformers' name of a kernel")
    parser.add_argument("--quick", action="store_true", help="tiny models and one repeat: does it run at all?")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = run(options)
    # Figures of a toy say nothing about a target.
    passed = options.quick or met(figures)
    print(f"targets {'met' if passed else 'missed'}")
    if options.json:
        print(json.dumps(figures | {"met": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
