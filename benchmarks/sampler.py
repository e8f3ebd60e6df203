"""The sampler's engines: throughput through the node, swaps, memory over swaps, log-probs after them.

bin/python -m benchmarks.sampler --engine transformers --json
bin/python -m benchmarks.sampler --engine vllm --json
bin/python -m benchmarks.sampler --engine transformers --device cuda --parameters 0.6e9 --json

Models are random (benchmarks/sampler_models.py). Throughput is compared with the bare library in the same run, taking
turns and drawing as many samples at once (sampler_throughput.py); swaps are timed in their parts against the size of
the model, repeated 200 times for memory, and after each of 20 of another model the engine's log-probs are compared with
those of transformers in float32 (sampler_swaps.py). What a swap costs in all, with the caches that are computed again,
is measured with contexts of 1,000 tokens (sampler_recompute.py). On a GPU all of this is of the one model that is asked
for, and a learner's step is timed on it too (sampler_learner.py).

Targets: throughput at least 0.95 of the bare library's; log-probs within 1e-4 in float32, 0.02 in the mean in bf16;
resident memory flat. `--quick` runs all of it on next to nothing and judges the log-probs alone. Exit status 1 if one
is missed. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import sampler_learner, sampler_recompute, sampler_swaps, sampler_throughput
from benchmarks.sampler_models import REAL_VOCABULARY, Size, random_model
from benchmarks.sampler_throughput import Load
from swarm.sampler.engine import EngineDtype, EngineKind

PARTS = ("throughput", "swaps", "recompute", "learner")

QUICK = Load(parameters=3e5, vocab_size=1024, context_tokens=64, places=4, samples=8, prompt_tokens=8, most_tokens=8)


def load_of(parameters: float, *, on_gpu: bool) -> Load:
    """What throughput is measured with: batches that fill a device of that kind for seconds."""
    if on_gpu:
        return Load(
            parameters=parameters,
            vocab_size=REAL_VOCABULARY,
            context_tokens=1024,
            places=64,
            samples=256,
            prompt_tokens=64,
            most_tokens=256,
        )
    return Load(
        parameters=parameters,
        vocab_size=1024,
        context_tokens=256,
        places=16,
        samples=64,
        prompt_tokens=32,
        most_tokens=64,
    )


async def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All parts that were asked for, said as they come."""
    kind: EngineKind = options.engine
    say = partial(print, flush=True)
    on_gpu = options.device.startswith("cuda")
    load = QUICK if options.quick else load_of(options.parameters or (6e8 if on_gpu else 1e7), on_gpu=on_gpu)
    figures: dict[str, Any] = {"engine": kind, "device": options.device, "load_average": os.getloadavg()[0]}
    if "throughput" in options.parts:
        figures |= await sampler_throughput.measure(
            kind, directory / "throughput", say, load, repeats=1 if options.quick else 5, device=options.device
        )
    sizes = sampler_swaps.QUICK_SIZES if options.quick else (load.parameters,) if on_gpu else sampler_swaps.SIZES
    if "swaps" in options.parts:
        dtypes: Sequence[EngineDtype] = options.dtypes
        figures |= await sampler_swaps.measure(
            kind, directory / "swaps", say, device=options.device, quick=options.quick, dtypes=dtypes, sizes=sizes
        )
    if "recompute" in options.parts:
        figures |= await sampler_recompute.measure(
            kind, directory / "recompute", say, device=options.device, quick=options.quick, sizes=sizes
        )
    if "learner" in options.parts and (on_gpu or options.quick):
        model = random_model(Size(parameters=load.parameters, vocab_size=load.vocab_size))
        figures["learner"] = []
        for dtype in ("bfloat16", "float32"):
            steps = await sampler_learner.learner_steps(
                directory / "learner",
                model,
                dtype=dtype,
                device=options.device,
                groups=1 if options.quick else 16,
                completion_tokens=load.most_tokens,
                steps=1 if options.quick else 5,
            )
            say(sampler_learner.line(steps))
            figures["learner"].append(asdict(steps))
    return figures


def met(figures: dict[str, Any], *, quick: bool) -> bool:
    """Every target of what was measured; of a quick run that of log-probs."""
    return figures.get("swaps_met", True) and (quick or figures.get("throughput_met", True))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("transformers", "vllm"), required=True)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda and cuda:N for transformers")
    parser.add_argument("--parameters", type=float, help="of the model for throughput; on a GPU for swaps as well")
    parser.add_argument("--parts", type=_list_of(PARTS), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--dtypes", type=_list_of(("float32", "bfloat16")), default=("float32", "bfloat16"))
    parser.add_argument("--quick", action="store_true", help="tiny models and few repeats: does it run at all?")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args(arguments)


def _list_of(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        if not set(text.split(",")) <= set(known):
            raise argparse.ArgumentTypeError(f"some of {','.join(known)}")
        return tuple(text.split(","))

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # More threads than cores wait for one another where two processes take turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="echo-node-sampler-") as directory:
        figures = asyncio.run(run(options, Path(directory)))
    passed = met(figures, quick=options.quick)
    print(f"targets {'met' if passed else 'missed'}; {time.monotonic() - began:.0f} s")
    if options.json:
        print(json.dumps(figures | {"met": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
