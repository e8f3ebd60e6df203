"""The sampler's engines on a CPU: throughput through the node, swaps, memory over swaps, log-probs after them.

bin/python -m benchmarks.sampler --engine transformers --json
bin/python -m benchmarks.sampler --engine vllm --parts recompute --json

Models are random (benchmarks/sampler_models.py). The parts:
throughput  tokens per second through the node against the bare library, on the same prompts, taking turns. The node's
            side is what a session uses: leases into a feed as it has room, EngineWorker, the engine's process, answers
            kept in the spool. The bare side is a process that holds nothing but the library and gets all prompts in one
            call (sampler_bare.py). Both draw as many samples at once: the node's vLLM has a seat more than places, for
            probes, and a sample has it between them. Each sample ends by its length alone, so that both draw the same
            number of tokens. Engines that take on samples one by one get lengths from a half to all of the longest,
            those in lockstep one length
swaps       what a swap of a version takes against the size of the model, memory over 200 of them, and log-probs after
            each of 20 against those of transformers in float32 (sampler_swaps.py)
recompute   what a swap costs vLLM in all, with contexts of 1,000 tokens (sampler_swaps.py)

Each result is a line of JSON. Targets: throughput at least 0.95 of the bare library's; log-probs within 1e-4 in
float32, 0.02 in the mean in bf16; resident memory flat. Exit status 1 if one is missed. Needs psutil. On a GPU engines
are measured by `bin/gpu-check`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import sampler_swaps
from benchmarks.sampler_bare import BareDraw, BareDrawn, BareStart, BareStarted
from benchmarks.sampler_models import Size, Versions, parameters_of, random_model
from benchmarks.sampler_process import HANG_S, TIME_LIMIT_S, EngineBroken, cpu_seconds
from swarm.broadcast.coding import in_thread
from swarm.process import Child
from swarm.rollout.messages import Answer, SampleName, Stepped
from swarm.sampler.engine import EngineKind, EngineOptions, Job
from swarm.sampler.feeding import Feed
from swarm.sampler.spool import Spool
from swarm.sampler.vllm import versions as vllm_versions
from swarm.sampler.worker import EngineWorker
from swarm.types import Lease, SampleSpec, SamplingRules, VersionId

RATIO = 0.95
"""Least throughput through the node, of the bare library's."""

GROUP = 4
"""Samples of one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What both sides draw in each repeat."""

    parameters: float
    vocab_size: int
    context_tokens: int
    places: int
    samples: int
    prompt_tokens: int
    most_tokens: int

    def jobs(self, *, lockstep: bool, seed: int) -> tuple[Job, ...]:
        """Samples in groups of one prompt, in an order that repeats for the same seed."""
        random = Random(seed)
        jobs: list[Job] = []
        while len(jobs) < self.samples:
            prompt = tuple(random.randrange(self.vocab_size) for _ in range(self.prompt_tokens))
            for _ in range(GROUP):
                tokens = self.most_tokens if lockstep else random.randint(self.most_tokens // 2, self.most_tokens)
                rules = SamplingRules(temperature=1.0, max_new_tokens=tokens, stop_token_ids=())
                jobs.append(
                    Job(prompt_token_ids=prompt, seed=random.getrandbits(32), rules=rules, time_limit_s=TIME_LIMIT_S)
                )
        return tuple(jobs[: self.samples])


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """What one side drew, in how many seconds, and the CPU seconds of all its processes."""

    tokens: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Each repeat of the node and of the bare library, in turns. The ratio is that of the medians of their tokens per
    second; that of tokens per CPU second, of the node's own process too, hardly depends on what else runs."""

    parameters: int
    seats: int
    node: tuple[Repeat, ...]
    bare: tuple[Repeat, ...]
    load_average: float

    @property
    def ratio(self) -> float:
        return _median_rate(self.node) / _median_rate(self.bare)

    @property
    def cpu_ratio(self) -> float:
        return _median_cpu_rate(self.node) / _median_cpu_rate(self.bare)

    @property
    def met(self) -> bool:
        return self.ratio >= RATIO


def _median_rate(repeats: Sequence[Repeat]) -> float:
    return statistics.median(one.tokens / one.seconds for one in repeats)


def _median_cpu_rate(repeats: Sequence[Repeat]) -> float:
    # A clock of 10 ms.
    return statistics.median(one.tokens / max(one.cpu_s, 0.01) for one in repeats)


async def throughput(kind: EngineKind, directory: Path, load: Load, *, repeats: int) -> Throughput:
    """Both sides `repeats` times in turn, after one round each that is not counted."""
    size = Size(parameters=load.parameters, vocab_size=load.vocab_size, context_tokens=load.context_tokens)
    model = random_model(size)
    versions = Versions.of(model, directory)
    node: list[Repeat] = []
    bare: list[Repeat] = []
    async with _node(kind, directory, versions, load) as worker, _bare(kind, directory) as child:
        start = BareStart(
            directory=str(versions.files_dir),
            context_tokens=load.context_tokens,
            seats=seats_of(kind, worker, load),
            weight_bytes=versions.layout.total_bytes,
        )
        await child.call(start, BareStarted)
        spool = Spool(directory / "spool", "benchmark", lambda line: None)
        for repeat in range(repeats + 1):
            jobs = load.jobs(lockstep=worker.lockstep, seed=repeat)
            # In turns, so that neither always follows the other.
            for side in ("node", "bare") if repeat % 2 else ("bare", "node"):
                if side == "node":
                    node.append(await _through_node(worker, spool, jobs))
                else:
                    bare.append(await _through_bare(child, jobs))
    versions.close()
    return Throughput(
        parameters=parameters_of(model),
        seats=start.seats,
        node=tuple(node[1:]),
        bare=tuple(bare[1:]),
        load_average=os.getloadavg()[0],
    )


def seats_of(kind: EngineKind, worker: EngineWorker, load: Load) -> int:
    """How many samples the node's engine draws at once."""
    return vllm_versions.seats(load.places) if kind == "vllm" else worker.places


@asynccontextmanager
async def _node(kind: EngineKind, directory: Path, versions: Versions, load: Load) -> AsyncIterator[EngineWorker]:
    """The node's engine with the first version installed."""
    options = EngineOptions(device="cpu", max_model_len=load.context_tokens, places=load.places, hang_s=HANG_S)
    worker = EngineWorker(directory / "node", kind=kind, options=options)
    try:
        await worker.launch()
        await worker.load(versions.layout)
        versions.publish()
        current = versions.weights.current
        assert current is not None
        refused = await worker.install(current.head, current.table, versions.weights.path)
        if refused is not None:
            raise EngineBroken(refused.why)
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def _bare(kind: EngineKind, directory: Path) -> AsyncIterator[Child]:
    child = Child("bare library", "benchmarks.sampler_bare", kind, log=directory / "bare.log", hang_s=HANG_S)
    try:
        await child.start()
        yield child
    finally:
        await child.stop()


async def _through_bare(child: Child, jobs: tuple[Job, ...]) -> Repeat:
    spent_s = cpu_seconds(child.pid)
    drawn = await child.call(BareDraw(jobs=jobs), BareDrawn)
    return Repeat(tokens=drawn.tokens, seconds=drawn.seconds, cpu_s=cpu_seconds(child.pid) - spent_s)


async def _never(answer: Answer) -> Stepped:
    raise AssertionError


async def _through_node(worker: EngineWorker, spool: Spool, jobs: tuple[Job, ...]) -> Repeat:
    """From the first lease to the last answer on disk."""
    feed = Feed(worker, _never)
    missing = len(jobs)
    tokens = 0
    over = asyncio.Event()

    async def kept(samples: set[SampleName], answers: list[Answer]) -> None:
        nonlocal missing, tokens
        name = await in_thread(spool.keep, answers)
        rollouts = [answer.rollout for answer in answers]
        tokens += sum(len(rollout.token_ids) // 4 for rollout in rollouts)
        missing -= len(rollouts)
        if name is not None:
            await in_thread(spool.remove, name)
        if not missing:
            over.set()

    async def fed() -> None:
        at = 0
        while at < len(jobs):
            room = await feed.room()
            leases = [_lease(number, jobs[number]) for number in range(at, min(at + room.capacity, len(jobs)))]
            at += len(leases)
            feed.add(leases)

    engine: int = worker.status()["engine_pid"]
    spent_s = time.process_time() + cpu_seconds(engine)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(feed.run(kept))
        group.create_task(fed())
        await over.wait()
        seconds = time.perf_counter() - began
        cpu_s = time.process_time() + cpu_seconds(engine) - spent_s
        running.cancel()
    wanted = sum(job.rules.max_new_tokens for job in jobs)
    if tokens != wanted:
        raise EngineBroken(f"{tokens} tokens were drawn instead of {wanted}")
    return Repeat(tokens=tokens, seconds=seconds, cpu_s=cpu_s)


def _lease(number: int, job: Job) -> Lease:
    return Lease(
        purpose="train",
        group_id=f"t{number // GROUP}",
        prompt_token_ids=job.prompt_token_ids,
        samples=(SampleSpec(index=number % GROUP, seed=job.seed),),
        rules=job.rules,
        min_version=VersionId(incarnation=0, version=0),
        time_limit_s=job.time_limit_s,
    )


PARTS = ("throughput", "swaps", "recompute")

LOAD = Load(
    parameters=1e7,
    vocab_size=1024,
    context_tokens=256,
    places=16,
    samples=64,
    prompt_tokens=32,
    most_tokens=64,
)
"""Batches that fill two cores for seconds."""


async def run(kind: EngineKind, parts: Sequence[str], directory: Path) -> dict[str, Any]:
    """The figures of the parts that were asked for."""
    figures: dict[str, Any] = {"engine": kind, "load_average": os.getloadavg()[0], "met": True}
    if "throughput" in parts:
        found = await throughput(kind, directory / "throughput", LOAD, repeats=5)
        figures["throughput"] = asdict(found) | {"ratio": found.ratio, "cpu_ratio": found.cpu_ratio}
        figures["met"] &= found.met
        print(json.dumps(figures["throughput"]), flush=True)
    if "swaps" in parts:
        swaps = await sampler_swaps.measure(kind, directory / "swaps")
        figures |= swaps | {"met": figures["met"] and swaps["met"]}
    # Other engines install between two batches: no cache is computed again.
    if "recompute" in parts and kind == "vllm":
        figures["recompute"] = await sampler_swaps.measure_recompute(kind, directory / "recompute")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("transformers", "vllm"), required=True)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--json", action="store_true", help="all figures as the last line")
    options = parser.parse_args()
    # More threads than cores wait for one another where two processes take turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="echo-node-sampler-") as directory:
        figures = asyncio.run(run(options.engine, options.parts, Path(directory)))
    print(json.dumps(figures) if options.json else f"targets {'met' if figures['met'] else 'missed'}")
    return 0 if figures["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
