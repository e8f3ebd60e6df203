"""The sampler's engines on a CPU: throughput through the node, swaps, memory over swaps, log-probs after them.

bin/python -m benchmarks.sampler --engine transformers --json
bin/python -m benchmarks.sampler --engine vllm --parts recompute --json

Models are random (sampler_models.py). The parts, each result a line of JSON:
throughput  tokens per second through the node against the bare library, on the same prompts, taking turns. The node's
            side is what a session uses: leases into a feed as it has room, EngineWorker, the engine's process, answers
            kept in the spool. The bare side is a process that holds nothing but the library and gets all prompts in one
            call (sampler_bare.py). Both draw as many samples at once: the node's vLLM has a seat more than places, for
            probes. Each sample ends by its length alone: engines that take on samples one by one get lengths from a
            half to all of the longest, those in lockstep one length
swaps       what a swap of a version takes against the size of the model, memory over 200 of them, and log-probs after
            each of 20 against those of transformers in float32
recompute   what a swap costs vLLM in all, with contexts of 1,000 tokens, whose caches go with the old weights: three
            draws with all places filled, each for prompts of its own: a few tokens (`short`), all of them undisturbed
            (`whole`), and all with a swap half-way (`swapped`), which loses the seconds by which it is longer

Targets: throughput at least 0.95 of the bare library's; log-probs within 1e-4 in float32, 0.02 in the mean in bf16;
resident memory flat. Exit status 1 if one is missed. On a GPU engines are measured by `bin/gpu-check`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import Figures, ended, listed, parser_of, said
from benchmarks import sampler_models as models
from benchmarks.sampler_bare import BareDraw, BareDrawn, BareStart
from benchmarks.sampler_models import EngineBroken, EngineProcess, Size, Versions, random_job, step
from swarm.broadcast.coding import in_thread
from swarm.process import Child
from swarm.rollout.messages import Answer, SampleName, Stepped
from swarm.sampler.engine import EngineDtype, EngineKind, EngineOptions, Generate, Install, Installed, Job, Started
from swarm.sampler.feeding import Feed
from swarm.sampler.spool import Spool
from swarm.sampler.vllm import versions as vllm_versions
from swarm.sampler.worker import EngineWorker
from swarm.types import Lease, SampleSpec, SamplingRules, VersionId
from tests.unit.models import logprobs_of, published

PARTS = ("throughput", "swaps", "recompute")
LEARNING_STEP = 1e-6  # Moves some percent of the bf16 weights by one unit, as a learner's step does
VISIBLE_STEP = 0.01  # Moves log-probs by 0.1 and more: an engine that kept a tensor of the old version would be seen
PLACES = 8
SIZES = (3e5, 1e6, 1e7, 1e8)  # Parameters of the models whose swaps are timed
MEMORY_SIZE = 5e6  # Of the model that is swapped for memory: one copy left behind at each of 200 swaps would be 2 GB
SETTLED = 0.1  # Part of the swaps after which memory is first looked at
FLOAT32_ERROR, BF16_MEAN_ERROR = 1e-4, 0.02
RSS_GROWTH = 0.03  # What passes for flat: of 500 MB not quite two copies of the weights, where 180 were made
SHORT_TOKENS = 16  # Of a sample, so that a draw is a prefill and little else
RATIO = 0.95  # Least throughput through the node, of the bare library's
GROUP = 4  # Samples of one prompt


def vocabulary_of(parameters: float) -> int:
    return 32_768 if parameters >= 1e8 else 1024


def calls_of(jobs: Sequence[Job], started: Started) -> list[Generate]:
    """One call for an engine in lockstep, else one for each sample."""
    return [Generate(jobs=tuple(jobs))] if started.lockstep else [Generate(jobs=(job,)) for job in jobs]


@asynccontextmanager
async def drawing(
    kind: EngineKind, directory: Path, model: Any, places: int, dtype: EngineDtype = "auto"
) -> AsyncIterator[tuple[EngineProcess, Started, Versions]]:
    """An engine that holds the first version of a model."""
    versions = Versions(model, directory)
    async with models.running(kind, directory) as engine:
        started = await engine.start(versions, dtype=dtype, places=places)
        await engine.install(versions.publish())
        yield engine, started, versions
    versions.close()


# -- swaps -------------------------------------------------------------------------------------------------------


async def swap_times(
    kind: EngineKind, directory: Path, *, parameters: float, swaps: int, dtype: EngineDtype = "auto"
) -> Figures:
    """Medians over `swaps` swaps of a model, one learner's step each, all places drawing: apply on the map, then of the
    engine's call its parts. Samples stand still for `pause_s`, which costs `tokens_lost` at the speed with all places
    filled: of samples with next to no context, since caches that are computed again are not counted."""
    vocab_size = vocabulary_of(parameters)
    model = models.random_model(Size(parameters=parameters, vocab_size=vocab_size))
    async with drawing(kind, directory, model, PLACES, dtype) as (engine, started, versions):
        tokens_per_s = await _tokens_per_s(engine, started, vocab_size)
        rows = []
        async with models.kept_busy(engine, started, versions):
            for number in range(swaps):
                step(model, LEARNING_STEP, number)
                installed = await engine.install(versions.publish())
                rows.append((installed, versions.apply_s, versions.sent_share))
    pause_s = statistics.median(one.pause_s for one, _, _ in rows)
    return {
        "parameters": models.parameters_of(model),
        "weight_bytes": versions.layout.total_bytes,
        "sent_share": statistics.median(share for _, _, share in rows),
        "apply_s": statistics.median(apply_s for _, apply_s, _ in rows),
        "install_s": statistics.median(one.seconds for one, _, _ in rows),
        "pause_s": pause_s,
        "proof": rows[-1][0].proof,
        "tokens_per_s": tokens_per_s,
        "tokens_lost": pause_s * tokens_per_s,
    }


async def _tokens_per_s(engine: EngineProcess, started: Started, vocab_size: int) -> float:
    """The speed with all places filled, after a round that is not counted: libraries compile in it."""
    seconds, tokens = 0.0, 0
    for repeat in range(2):
        seeds = range(repeat * PLACES, repeat * PLACES + started.places)
        jobs = [random_job(seed, vocab_size, prompt_tokens=64, tokens=64) for seed in seeds]
        began = time.monotonic()
        drawn = await asyncio.gather(*map(engine.draw, calls_of(jobs, started)))
        seconds = time.monotonic() - began
        tokens = sum(len(models.ints(sample.token_ids)) for one in drawn for sample in one.samples)
    return tokens / seconds


async def accuracy(
    kind: EngineKind, directory: Path, *, architecture: models.Architecture, tied: bool, dtype: EngineDtype, swaps: int
) -> Figures:
    """Log-probs of what the engine drew after each of `swaps` swaps, against transformers in float32 on the published
    weights: largest and mean error over all swaps. `moved` is how far the swaps moved them, at least."""
    model = models.random_model(Size(parameters=2e6), architecture=architecture, tied=tied)
    errors, moved = list[float](), list[float]()
    async with drawing(kind, directory, model, 2, dtype) as (engine, started, versions):
        before = published(model)
        for number in range(swaps):
            step(model, VISIBLE_STEP, number)
            install = versions.publish()
            await engine.install(install)
            now = published(model)
            found, distance = await _compared(engine, started, install.version, before, now)
            errors += found
            moved.append(distance)
            before = now
    largest, mean = max(errors), statistics.fmean(errors)
    is_near = largest < FLOAT32_ERROR if started.dtype == "float32" else mean < BF16_MEAN_ERROR
    return {
        "architecture": architecture,
        "tied": tied,
        "dtype": started.dtype,
        "swaps": swaps,
        "max_error": largest,
        "mean_error": mean,
        "moved": min(moved),
        "met": is_near and min(moved) > 10 * mean,
    }


async def _compared(
    engine: EngineProcess, started: Started, version: VersionId, before: Any, now: Any
) -> tuple[list[float], float]:
    """Errors of every token of two samples, and the mean distance between the two versions on them."""
    errors, distances = list[float](), list[float]()
    jobs = [
        random_job(10 * version.version + n, now.config.vocab_size, prompt_tokens=8 + 5 * n, tokens=24)
        for n in range(2)
    ]
    samples = [sample for call in calls_of(jobs, started) for sample in (await engine.draw(call)).samples]
    for job, sample in zip(jobs, samples, strict=True):
        assert {span.version for span in sample.spans} == {version}, sample.fault
        drawn = models.ints(sample.token_ids)
        wanted = logprobs_of(now, job.prompt_token_ids, drawn)
        errors += _distances(models.floats(sample.logprobs), wanted)
        distances += _distances(logprobs_of(before, job.prompt_token_ids, drawn), wanted)
    return errors, statistics.fmean(distances)


def _distances(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


async def memory(kind: EngineKind, directory: Path, *, swaps: int) -> Figures:
    """Resident memory of the engine with all its processes after each of `swaps` swaps, with a batch between any two.
    It grows by the median of the last tenth over that of the first tenth after it has settled, less 1."""
    model, rss = models.random_model(Size(parameters=MEMORY_SIZE)), list[int]()
    async with drawing(kind, directory, model, 2) as (engine, started, versions):
        for number in range(swaps):
            step(model, LEARNING_STEP, number)
            await engine.install(versions.publish())
            jobs = [random_job(2 * number + n, 1024, prompt_tokens=8, tokens=8) for n in (0, 1)]
            for call in calls_of(jobs, started):
                await engine.draw(call)
            rss.append(engine.rss_bytes())
    part = max(1, round(SETTLED * len(rss)))
    growth = statistics.median(rss[-part:]) / statistics.median(rss[part : 2 * part] or rss) - 1
    return {"rss_mb": [round(one / 1e6, 1) for one in rss], "rss_growth": growth}


async def measure_swaps(kind: EngineKind, directory: Path) -> Figures:
    times = [
        said(await swap_times(kind, directory / f"times-{parameters:g}", parameters=parameters, swaps=7))
        for parameters in SIZES
    ]
    architectures: tuple[models.Architecture, ...] = ("qwen3", "llama")
    dtypes: tuple[EngineDtype, ...] = ("float32", "bfloat16")
    found = []
    for dtype, architecture, tied in product(dtypes, architectures, (True, False)):
        at = directory / f"{architecture}-{tied}-{dtype}"
        found.append(said(await accuracy(kind, at, architecture=architecture, tied=tied, dtype=dtype, swaps=20)))
    rss = said(await memory(kind, directory / "memory", swaps=200))
    met = rss["rss_growth"] <= RSS_GROWTH and all(one["met"] for one in found)
    return {"swaps": times, "accuracy": found, **rss, "met": met}


# -- caches that are computed again ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """Prompts and completions of the samples; half-way through they have about 1,000 tokens."""

    prompt_tokens: int = 872
    tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """All places drew once. `ends` are the tokens at which each sample came to its last version."""

    seconds: float
    cpu_s: float
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redrawn:
    short: Drawn
    whole: Drawn
    swapped: Drawn
    pause_s: float


async def recompute(
    kind: EngineKind, directory: Path, *, parameters: float, repeats: int, contexts: Contexts
) -> Figures:
    """Time `repeats` swaps after one that is not counted. Raise EngineBroken if none met all samples while they were
    drawn."""
    vocab_size, total = vocabulary_of(parameters), contexts.prompt_tokens + contexts.tokens
    model = models.random_model(Size(parameters=parameters, vocab_size=vocab_size, context_tokens=total))
    found = []
    async with drawing(kind, directory, model, PLACES) as (engine, _, versions):
        for number in range(repeats + 1):
            step(model, LEARNING_STEP, number)
            found.append(await _repeat(engine, versions.publish(), number, vocab_size, contexts))
    counted = [one for one in found[1:] if min(one.swapped.ends) > 0]
    if not counted:
        raise EngineBroken("no swap fell within the samples: the machine is too busy to say what one costs")
    return summed_up(models.parameters_of(model), counted, contexts)


async def _repeat(engine: EngineProcess, install: Install, number: int, vocab_size: int, contexts: Contexts) -> Redrawn:
    async def draw(kind: int, tokens: int) -> Drawn:
        # Prompts of its own: vLLM keeps the caches of those it has seen.
        seeds = range(PLACES * (3 * number + kind), PLACES * (3 * number + kind + 1))
        jobs = [random_job(seed, vocab_size, prompt_tokens=contexts.prompt_tokens, tokens=tokens) for seed in seeds]
        began, spent_s = time.perf_counter(), engine.cpu_s()
        samples = (await engine.draw(Generate(jobs=tuple(jobs)))).samples
        ends = tuple(sample.spans[-1].start for sample in samples)
        return Drawn(seconds=time.perf_counter() - began, cpu_s=engine.cpu_s() - spent_s, ends=ends)

    async def install_after(seconds: float) -> Installed:
        await asyncio.sleep(seconds)
        return await engine.install(install)

    short, whole = await draw(0, SHORT_TOKENS), await draw(1, contexts.tokens)
    installing = asyncio.create_task(install_after((short.seconds + whole.seconds) / 2))
    swapped = await draw(2, contexts.tokens)
    return Redrawn(short=short, whole=whole, swapped=swapped, pause_s=(await installing).pause_s)


def summed_up(parameters: int, repeats: Sequence[Redrawn], contexts: Contexts) -> Figures:
    """Medians over the repeats. `context_tokens` is what a sample had when the swap met it, in the mean; `tokens_per_s`
    is of all places with such contexts. A swap loses the pause, the prefill of all contexts, and what check and probe
    take of the machine meanwhile."""
    median = statistics.median
    lost_s = [one.swapped.seconds - one.whole.seconds for one in repeats]
    drawn = PLACES * (contexts.tokens - SHORT_TOKENS)
    rate = median(drawn / (one.whole.seconds - one.short.seconds) for one in repeats)
    return {
        "parameters": parameters,
        "repeats": len(repeats),
        "places": PLACES,
        "context_tokens": contexts.prompt_tokens + statistics.fmean(end for one in repeats for end in one.swapped.ends),
        "prefill_s": median(one.short.seconds for one in repeats),
        "tokens_per_s": rate,
        "pause_s": median(one.pause_s for one in repeats),
        "lost_s": median(lost_s),
        "min_lost_s": min(lost_s),
        "max_lost_s": max(lost_s),
        "lost_cpu_s": median(one.swapped.cpu_s - one.whole.cpu_s for one in repeats),
        "tokens_lost": median(lost_s) * rate,
    }


# -- throughput --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What both sides draw in each repeat: batches that fill two cores for seconds."""

    parameters: float = 1e7
    vocab_size: int = 1024
    context_tokens: int = 256
    places: int = 16
    samples: int = 64
    prompt_tokens: int = 32
    most_tokens: int = 64

    def jobs(self, *, lockstep: bool, seed: int) -> tuple[Job, ...]:
        """Samples in groups of one prompt, in an order that repeats for the same seed."""
        random = Random(seed)
        jobs: list[Job] = []
        while len(jobs) < self.samples:
            prompt = tuple(random.randrange(self.vocab_size) for _ in range(self.prompt_tokens))
            for _ in range(GROUP):
                tokens = self.most_tokens if lockstep else random.randint(self.most_tokens // 2, self.most_tokens)
                rules = SamplingRules(temperature=1.0, max_new_tokens=tokens, stop_token_ids=())
                jobs.append(Job(prompt, random.getrandbits(32), rules, models.TIME_LIMIT_S))
        return tuple(jobs[: self.samples])


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """What one side drew, in how many seconds, and the CPU seconds of all its processes."""

    tokens: int
    seconds: float
    cpu_s: float


async def throughput(kind: EngineKind, directory: Path, load: Load, *, repeats: int) -> Figures:
    """Both sides `repeats` times in turn, after one round each that is not counted. The ratio is that of the medians of
    their tokens per second; that of tokens per CPU second, of the node's own process too, hardly depends on what else
    runs."""
    size = Size(parameters=load.parameters, vocab_size=load.vocab_size, context_tokens=load.context_tokens)
    model = models.random_model(size)
    versions = Versions(model, directory)
    node, bare = list[Repeat](), list[Repeat]()
    async with _node(kind, directory, versions, load) as worker, _bare(kind, directory) as child:
        start = BareStart(
            directory=str(versions.files_dir),
            context_tokens=load.context_tokens,
            seats=vllm_versions.seats(load.places) if kind == "vllm" else worker.places,
            weight_bytes=versions.layout.total_bytes,
        )
        await child.call(start, BareDrawn)
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
    rates, cpu_rates = (
        [statistics.median(one.tokens / getattr(one, name) for one in side[1:]) for side in (node, bare)]
        for name in ("seconds", "cpu_s")
    )
    return {
        "parameters": models.parameters_of(model),
        "seats": start.seats,
        "node": [asdict(one) for one in node[1:]],
        "bare": [asdict(one) for one in bare[1:]],
        "load_average": os.getloadavg()[0],
        "ratio": rates[0] / rates[1],
        "cpu_ratio": cpu_rates[0] / cpu_rates[1],
    }


@asynccontextmanager
async def _node(kind: EngineKind, directory: Path, versions: Versions, load: Load) -> AsyncIterator[EngineWorker]:
    options = EngineOptions(device="cpu", max_model_len=load.context_tokens, places=load.places, hang_s=models.HANG_S)
    worker = EngineWorker(directory / "node", kind=kind, options=options)
    try:
        await worker.launch()
        await worker.load(versions.layout)
        versions.publish()
        current = versions.weights.current
        assert current is not None
        refused = await worker.install(current.head.version, current.table.tensor_sums, versions.weights.path)
        if refused is not None:
            raise EngineBroken(refused.why)
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def _bare(kind: EngineKind, directory: Path) -> AsyncIterator[Child]:
    child = Child("bare library", "benchmarks.sampler_bare", kind, log=directory / "bare.log", hang_s=models.HANG_S)
    try:
        await child.start()
        yield child
    finally:
        await child.stop()


async def _through_bare(child: Child, jobs: tuple[Job, ...]) -> Repeat:
    spent_s = models.cpu_seconds(child.pid)
    drawn = await child.call(BareDraw(jobs=jobs), BareDrawn)
    # A clock of 10 ms.
    return Repeat(tokens=drawn.tokens, seconds=drawn.seconds, cpu_s=max(0.01, models.cpu_seconds(child.pid) - spent_s))


async def _never(answer: Answer) -> Stepped:
    raise AssertionError


async def _through_node(worker: EngineWorker, spool: Spool, jobs: tuple[Job, ...]) -> Repeat:
    """From the first lease to the last answer on disk."""
    feed = Feed(worker, _never)
    missing, tokens, over = len(jobs), 0, asyncio.Event()

    async def kept(samples: set[SampleName], answers: list[Answer]) -> None:
        nonlocal missing, tokens
        path = await in_thread(spool.keep, answers)
        tokens += sum(len(answer.rollout.token_ids) // 4 for answer in answers)
        missing -= len(answers)
        if path is not None:
            await in_thread(spool.remove, path)
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
    spent_s, began = time.process_time() + models.cpu_seconds(engine), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        feeding = group.create_task(feed.run(kept))
        group.create_task(fed())
        await over.wait()
        seconds = time.perf_counter() - began
        cpu_s = time.process_time() + models.cpu_seconds(engine) - spent_s
        feeding.cancel()
    wanted = sum(job.rules.max_new_tokens for job in jobs)
    if tokens != wanted:
        raise EngineBroken(f"{tokens} tokens were drawn instead of {wanted}")
    return Repeat(tokens=tokens, seconds=seconds, cpu_s=max(0.01, cpu_s))


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


# -- the command -------------------------------------------------------------------------------------------------


async def run(kind: EngineKind, parts: Sequence[str], directory: Path) -> Figures:
    figures: Figures = {"engine": kind, "load_average": os.getloadavg()[0], "met": True}
    if "throughput" in parts:
        figures["throughput"] = said(await throughput(kind, directory / "throughput", Load(), repeats=5))
        figures["met"] = figures["throughput"]["ratio"] >= RATIO
    if "swaps" in parts:
        swaps = await measure_swaps(kind, directory / "swaps")
        figures |= swaps | {"met": figures["met"] and swaps["met"]}
    # Other engines install between two batches: no cache is computed again.
    if "recompute" in parts and kind == "vllm":
        figures["recompute"] = [
            said(await recompute(kind, directory / f"{size:g}", parameters=size, repeats=5, contexts=Contexts()))
            for size in SIZES
        ]
    return figures


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=("transformers", "vllm"), required=True)
    parser.add_argument("--parts", type=listed(str), default=PARTS, help=",".join(PARTS))
    options = parser.parse_args()
    # More threads than cores wait for one another where two processes take turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="echo-node-sampler-") as directory:
        figures = asyncio.run(run(options.engine, options.parts, Path(directory)))
    return ended(options, figures, met=figures["met"])


if __name__ == "__main__":
    sys.exit(main())
