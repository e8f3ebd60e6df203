"""Samplers that the learner's machine runs itself: `join` processes like anybody's, if they fit next to its trainer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from swarm.errors import UserError
from swarm.learner.messages import Prepared
from swarm.run.directory import LOGS
from swarm.run.local import last_words, start_node, stop_nodes
from swarm.sampler.engine import EngineOptions
from swarm.sampler.room import CPU_SHARE, Device, places, shape_of_layout

LIVES = 3  # Of one sampler: what killed it twice will mostly kill it again
LONG_S = 3600.0  # After a life of this length it has others before it
REFUSED = 2  # Its exit status if it could never work here, for want of memory or of a package
AGAIN_S = 10.0  # Before one that ended early is started again


def other_gpus(device: str, ranks: int, gpus: Sequence[str]) -> list[str]:
    """Return the GPUs that the trainer, which computes on `device` or with several ranks, leaves alone."""
    if not device.startswith("cuda"):
        return []
    first = int(device.partition(":")[2] or 0) if ranks == 1 else 0
    return [gpu for number, gpu in enumerate(gpus) if not first <= number < first + ranks]


def default_count(prepared: Prepared, sample_tokens: int) -> tuple[int, str]:
    """Return 1 if a sampler fits into what a learner step leaves of its device, else 0; and why there is none."""
    is_gpu = prepared.device.startswith("cuda")
    device = Device(
        where=prepared.device,
        free_bytes=prepared.left_bytes,
        share=1.0 if is_gpu else CPU_SHARE,
        max_places=1,
        dtype="bfloat16" if is_gpu else "float32",
    )
    try:
        places(shape_of_layout(prepared.layout), device, EngineOptions(sample_tokens=sample_tokens))
    except UserError as error:
        why = str(error).partition("; change")[0].replace("has", "will have", 1)
        return 0, f"this machine draws no samples, only others do (--samplers 1 tries): {why}"
    return 1, ""


def arguments(prepared: Prepared, bootstrap: str, *, sharing: int) -> list[str]:
    """Return the command of such a sampler. `sharing` of them get what steps leave of the trainer's GPU."""
    words = ["join", "--role", "sampler", "--bootstrap", bootstrap, "--lan", "--nickname", "learner's own"]
    words += ["--grace", "0"]  # Nobody wants what is under way when its learner ends
    if prepared.whole_bytes and sharing:
        words += ["--gpu-memory-share", f"{max(0.01, prepared.left_bytes / prepared.whole_bytes / sharing):.2f}"]
    return words


@asynccontextmanager
async def drawing(
    count: int, run_dir: Path, words: Sequence[str], gpus: Sequence[str], say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Keep `count` samplers running, which end with the run, or when this is left. They share the `gpus`, if any, and
    half of the cores."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2 // count))}
    places = [threads | ({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}) for i in range(count)]
    keeping = [asyncio.create_task(_keep(f"sampler-{i}", place, run_dir, words, say)) for i, place in enumerate(places)]
    try:
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


async def _keep(
    name: str, place: Mapping[str, str], run_dir: Path, words: Sequence[str], say: Callable[[str], None]
) -> None:
    log, life = run_dir / LOGS / f"{name}.log", 0
    while True:
        began, life = time.monotonic(), life + 1
        process = await start_node(log, *words, "--state-dir", str(run_dir / name), environment=place)
        try:
            await process.wait()
        finally:
            await stop_nodes([process])
        if process.returncode == 0:
            return
        life = life if time.monotonic() - began < LONG_S else 1
        is_last = life == LIVES or process.returncode == REFUSED
        then = "it is not started again: others may join" if is_last else "starting it again"
        say(f"the sampler of this machine ended: {last_words(log)}; {then}")
        if is_last:
            return
        await asyncio.sleep(AGAIN_S)
