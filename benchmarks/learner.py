"""Speed, memory and publishing of a learner step.

python -m benchmarks.learner --json

Seconds on the CPU are those of the process, on one thread: what else runs on the machine counts little.

Speed: tokens/s of ours against the bare transformers step of benchmarks/learner_step.py, in turns in the same process,
medians of the repeats. `mixed` are completions of 16 to 240 tokens, where ours puts rows of like length together;
`alike` are rows of one length with one token of prompt, where nothing can be gained by that.
Memory: peak of two steps, each variant in a process of its own, over the bytes of the float32 weights.
Publishing: cast to bf16 into the staging file, encode as a delta, first chunk read, after each of a few steps. As a
share of a step of REAL_STEP_TOKENS tokens, extrapolated from the speed measured: publishing does not depend on tokens.
On CUDA besides: model FLOP/s utilisation in bf16 of a model of 0.6 billion parameters, `--parameters 1.5e9` of another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.learner_step import VARIANTS, Peak, Variant, Work, bare_step, our_step, rules_of, tokens_of
from benchmarks.sampler_models import CHUNK_BYTES, KEY
from swarm.broadcast.coding import coding_pool
from swarm.broadcast.publishing import PublishedVersions
from swarm.learner.checkpoint import layout_of, stream_tensors, write_staging
from swarm.learner.memory import Shape, shape_of
from swarm.types import VersionId

SPEED_TARGET = 0.9
PUBLISH_TARGET = 0.05
ESTIMATE_TARGET = 0.25
"""How far the preflight's estimate may be from the measured peak."""

REAL_STEP_TOKENS = 32 * 16 * 512
"""Of a step that somebody would take with a model of this size and more: 32 prompts, 16 samples, 512 tokens."""

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

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16 of a device, by a part of its name, from the vendor's data sheets."""

PROCESS_S = 1800.0
"""Longest time for one process of the memory part; a loaded machine took 200 s."""

Say = Callable[[str], None]


def speed(work: Work, repeats: int) -> dict[str, float]:
    """Tokens/s of ours and of the bare step, and their ratio, medians over alternating repeats."""
    rules = rules_of("chunked", work)
    steps = {"ours": our_step(work, work.model(), rules), "bare": bare_step(work, work.model(), rules)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        groups = work.rollouts(repeat)
        for name in sorted(steps, reverse=bool(repeat % 2)):
            took = steps[name](groups)
            if repeat:
                # The first makes AdamW's moments and warms the caches.
                seconds[name].append(took / tokens_of(groups))
    rates = {name: 1 / statistics.median(took) for name, took in seconds.items()}
    pairs = [bare / ours for ours, bare in zip(seconds["ours"], seconds["bare"], strict=True)]
    return {
        "ours_tokens_per_s": rates["ours"],
        "bare_tokens_per_s": rates["bare"],
        "ratio": statistics.median(pairs),
        "least_ratio": min(pairs),
        "most_ratio": max(pairs),
    }


def peak(variant: Variant, work: Work) -> Peak:
    """Measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.learner_step", variant, msgspec.json.encode(work).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROCESS_S)
    return Peak(**json.loads(done.stdout.strip().splitlines()[-1]))


def publishing(work: Work, directory: Path, repeats: int) -> dict[str, float]:
    """Median seconds of the parts of publishing, of versions after the first."""
    model = work.model()
    step = our_step(work, model, rules_of("chunked", work))
    tensors = stream_tensors(model)
    versions = PublishedVersions(directory / "published", KEY, layout_of(tensors, ()))
    staging, pool = directory / "staging.bin", coding_pool()
    taken: list[tuple[float, float, float]] = []
    for version in range(repeats + 1):
        groups = work.rollouts(version)
        step(groups)
        began = time.process_time()
        write_staging(tensors, staging)
        cast = time.process_time()
        held = versions.publish(staging, VersionId(incarnation=0, version=version), CHUNK_BYTES, pool)
        encoded = time.process_time()
        assert len(held.chunks.chunk(0))
        taken.append((cast - began, encoded - cast, time.process_time() - encoded))
    pool.shutdown()
    versions.weights.close()
    cast_s, encode_s, first_s = (statistics.median(part) for part in zip(*taken[1:], strict=True))
    return {
        "cast_s": cast_s,
        "encode_s": encode_s,
        "first_chunk_s": first_s,
        "publish_s": cast_s + encode_s + first_s,
        "published_bytes": float(sum(spec.nbytes for spec in tensors)),
    }


def flops_per_token(shape: Shape, context: float) -> float:
    """Forward and backward of one token that sees `context` others: 6 of each weight that multiplies, and 12 of each
    element of queries in each layer (the appendix of PaLM), halved since attention is causal."""
    embedding = shape.vocab_size * shape.hidden
    return 6 * (shape.parameters - embedding) + 6 * embedding + 6 * shape.layers * shape.queries * context


def utilisation(work: Work, repeats: int) -> dict[str, float]:
    """Model FLOP/s over the peak of the device; recomputed layers and filling are not counted as work."""
    model = work.model()
    shape = shape_of(model)
    step = our_step(work, model, rules_of("chunked", work))
    step(work.rollouts(0))
    rates = []
    for seed in range(1, repeats + 1):
        groups = work.rollouts(seed)
        rates.append(tokens_of(groups) / step(groups))
    rate = statistics.median(rates)
    name = torch.cuda.get_device_name()
    most = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    found = {"tokens_per_s": rate, "parameters": float(shape.parameters)}
    if most is not None:
        found["mfu"] = rate * flops_per_token(shape, work.prompt_tokens + (work.least + work.most) / 2) / most
    return found


def run(options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    """All parts that were asked for, said as they come."""
    quick, repeats = options.quick, 1 if options.quick else options.repeats
    figures: dict[str, Any] = {"load_average": os.getloadavg()[0], "threads": torch.get_num_threads()}
    if "speed" in options.parts:
        for name, work in (("mixed", SPEED), ("alike", ALIKE)):
            found = figures[name] = speed(QUICK if quick else work, repeats)
            say(
                f"{name}: {found['ours_tokens_per_s']:,.0f} tokens/s, bare {found['bare_tokens_per_s']:,.0f}: "
                f"{found['ratio']:.2f} times ({found['least_ratio']:.2f} to {found['most_ratio']:.2f}; "
                f"target {SPEED_TARGET})"
            )
    if "memory" in options.parts:
        figures["memory"] = []
        for variant in VARIANTS:
            of = peak(variant, QUICK if quick else MEMORY)
            estimate = "" if variant == "bare" else f", estimated {of.estimate_ratio:.2f} times that"
            say(f"peak, {variant}: {of.peak_bytes / 1e6:,.0f} MB, {of.per_model_byte:.1f} times the weights{estimate}")
            figures["memory"].append(asdict(of) | {"estimate_ratio": of.estimate_ratio})
    if "publish" in options.parts:
        found = figures["publish"] = publishing(QUICK if quick else SPEED, directory, repeats)
        if "mixed" in figures:
            found["step_s"] = REAL_STEP_TOKENS / figures["mixed"]["ours_tokens_per_s"]
            found["share"] = found["publish_s"] / found["step_s"]
        say(publish_line(found))
    if "mfu" in options.parts:
        figures["mfu"] = _mfu(options, repeats, say)
    return figures


def publish_line(found: dict[str, float]) -> str:
    parts = (
        f"publishing {found['published_bytes'] / 1e6:.0f} MB: cast {found['cast_s'] * 1e3:.0f} ms, encode "
        f"{found['encode_s'] * 1e3:.0f} ms, first chunk {found['first_chunk_s'] * 1e3:.1f} ms"
    )
    if "share" not in found:
        return parts
    return (
        f"{parts}: {found['share']:.2%} of a step of {REAL_STEP_TOKENS:,} tokens, {found['step_s']:,.0f} s at the "
        f"speed above (target {PUBLISH_TARGET:.0%})"
    )


def _mfu(options: argparse.Namespace, repeats: int, say: Say) -> dict[str, float] | None:
    if not torch.cuda.is_available():
        say("MFU: not measured, there is no CUDA device here")
        return None
    found = utilisation(replace(CUDA, parameters=options.parameters), repeats)
    say(f"MFU of {found['parameters']:,.0f} parameters in bf16: {found.get('mfu', float('nan')):.1%}")
    return found


def met(figures: dict[str, Any]) -> bool:
    """Every target of what was measured."""
    speeds = [figures[name]["ratio"] >= SPEED_TARGET for name in ("mixed",) if name in figures]
    estimates = [
        abs(of["estimate_ratio"] - 1) <= ESTIMATE_TARGET for of in figures.get("memory", ()) if of["variant"] != "bare"
    ]
    share = figures.get("publish", {}).get("share", 0.0)
    return all(speeds) and all(estimates) and share <= PUBLISH_TARGET


PARTS = ("speed", "memory", "publish", "mfu")


def _parts(text: str) -> tuple[str, ...]:
    if not set(text.split(",")) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"some of {','.join(PARTS)}")
    return tuple(text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=_parts, default=PARTS, help=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parameters", type=float, default=6e8, help="of the model on CUDA")
    parser.add_argument("--quick", action="store_true", help="tiny models and one repeat: does it run at all?")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="echo-node-learner-") as directory:
        figures = run(options, Path(directory), lambda line: print(line, flush=True))
    # Figures of a toy say nothing about a target.
    passed = options.quick or met(figures)
    print(f"targets {'met' if passed else 'missed'}; {time.monotonic() - began:.0f} s")
    if options.json:
        print(json.dumps(figures | {"met": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
