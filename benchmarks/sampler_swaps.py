"""Swaps of a version beneath an engine: what one takes, what it costs in tokens and memory, what is held after it.

What a swap costs samples with long contexts, because their caches go with the old weights and are computed again, is
measured by repeats of three draws with all places filled, each for prompts of its own: a few tokens (`short`), all of
them undisturbed (`whole`), and all with a swap half-way (`swapped`). A swap loses the seconds by which `swapped` is
longer than `whole`: the pause, the prefill of all contexts, and what check and probe take of the machine meanwhile. The
speed from `short` to `whole` turns them into tokens. CPU seconds of the engine's processes hardly depend on what else
runs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.sampler_models import (
    Architecture,
    Size,
    Versions,
    floats,
    ints,
    parameters_of,
    random_model,
    step,
)
from benchmarks.sampler_process import EngineBroken, EngineProcess, kept_busy, random_job, running
from swarm.sampler.engine import EngineDtype, EngineKind, Generate, Install, Installed, Started
from swarm.types import VersionId
from tests.unit.models import logprobs_of, published

LEARNING_STEP = 1e-6
"""Moves some percent of the bf16 weights by one unit, as a learner's step does: deltas of about a hundredth."""

VISIBLE_STEP = 0.01
"""Moves log-probs by 0.1 and more: an engine that kept a tensor of the old version would be seen."""

PLACES = 8

SIZES = (3e5, 1e6, 1e7, 1e8)
"""Parameters of the models whose swaps are timed."""

MEMORY_SIZE = 5e6
"""Of the model that is swapped for memory: one copy left behind at each of 200 swaps would be 2 GB."""

SETTLED = 0.1
"""Part of the swaps after which memory is first looked at: allocators have grown to what they need by then."""

FLOAT32_ERROR = 1e-4
BF16_MEAN_ERROR = 0.02
RSS_GROWTH = 0.03
"""What passes for flat: of 500 MB not quite two copies of the weights, where 180 were made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTimes:
    """Medians over the swaps of one model, in seconds: apply on the map, then of the engine's call its parts.

    Samples stand still for `pause_s`, which costs `tokens_lost` at the speed with all places filled: of samples with
    next to no context, since caches that are computed again are not counted (see `Recompute`)."""

    parameters: int
    weight_bytes: int
    sent_share: float
    apply_s: float
    install_s: float
    pause_s: float
    proof: str
    tokens_per_s: float

    @property
    def tokens_lost(self) -> float:
        return self.pause_s * self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Log-probs of what the engine drew after each swap, against transformers in float32 on the
    published weights: largest and mean error over all swaps. `moved` is how far the swaps moved them, at least."""

    architecture: Architecture
    tied: bool
    dtype: str
    swaps: int
    max_error: float
    mean_error: float
    moved: float

    @property
    def met(self) -> bool:
        seen = self.moved > 10 * self.mean_error
        return seen and (
            self.max_error < FLOAT32_ERROR if self.dtype == "float32" else self.mean_error < BF16_MEAN_ERROR
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident bytes of the engine with all its processes, after each swap."""

    rss_bytes: tuple[int, ...]

    @property
    def growth(self) -> float:
        """Median of the last tenth over that of the first tenth after memory has settled, less 1."""
        part = max(1, round(SETTLED * len(self.rss_bytes)))
        settled = statistics.median(self.rss_bytes[part : 2 * part] or self.rss_bytes)
        return statistics.median(self.rss_bytes[-part:]) / settled - 1


async def swap_times(
    kind: EngineKind, directory: Path, *, parameters: float, swaps: int, dtype: EngineDtype = "auto"
) -> SwapTimes:
    """Time `swaps` swaps of a model of about `parameters` parameters, one learner's step each, all places drawing."""
    vocab_size = 32_768 if parameters >= 1e8 else 1024
    versions = Versions.of(random_model(Size(parameters=parameters, vocab_size=vocab_size)), directory)
    async with running(kind, directory) as engine:
        started = await engine.start(versions, dtype=dtype, places=PLACES)
        await engine.install(versions.publish())
        tokens_per_s = await _tokens_per_s(engine, started, vocab_size)
        rows = []
        async with kept_busy(engine, started, versions):
            for number in range(swaps):
                step(versions.model, LEARNING_STEP, number)
                installed = await engine.install(versions.publish())
                rows.append((installed, versions.apply_s, versions.sent_share))
    versions.close()
    median = statistics.median
    return SwapTimes(
        parameters=parameters_of(versions.model),
        weight_bytes=versions.layout.total_bytes,
        sent_share=median(share for _, _, share in rows),
        apply_s=median(apply_s for _, apply_s, _ in rows),
        install_s=median(one.seconds for one, _, _ in rows),
        pause_s=median(one.pause_s for one, _, _ in rows),
        proof=rows[-1][0].proof,
        tokens_per_s=tokens_per_s,
    )


async def _tokens_per_s(engine: EngineProcess, started: Started, vocab_size: int) -> float:
    """The speed with all places filled, after a round that is not counted: libraries compile in it."""
    seconds, tokens = 0.0, 0
    for repeat in range(2):
        jobs = [
            random_job(repeat * PLACES + place, vocab_size, prompt_tokens=64, tokens=64)
            for place in range(started.places)
        ]
        began = time.monotonic()
        calls = [Generate(jobs=tuple(jobs))] if started.lockstep else [Generate(jobs=(job,)) for job in jobs]
        drawn = await asyncio.gather(*map(engine.draw, calls))
        seconds = time.monotonic() - began
        tokens = sum(len(ints(sample.token_ids)) for one in drawn for sample in one.samples)
    return tokens / seconds


async def accuracy(
    kind: EngineKind,
    directory: Path,
    *,
    architecture: Architecture,
    tied: bool,
    dtype: EngineDtype,
    swaps: int,
) -> Accuracy:
    """Swap to another version `swaps` times, and compare what the engine says of it each time."""
    model = random_model(Size(parameters=2e6), architecture=architecture, tied=tied)
    versions = Versions.of(model, directory)
    errors: list[float] = []
    moved: list[float] = []
    async with running(kind, directory) as engine:
        started = await engine.start(versions, dtype=dtype, places=2)
        await engine.install(versions.publish())
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
    versions.close()
    return Accuracy(
        architecture=architecture,
        tied=tied,
        dtype=started.dtype,
        swaps=swaps,
        max_error=max(errors),
        mean_error=statistics.fmean(errors),
        moved=min(moved),
    )


async def _compared(
    engine: EngineProcess, started: Started, version: VersionId, before: Any, now: Any
) -> tuple[list[float], float]:
    """Errors of every token of two samples, and the mean distance between the two versions on them."""
    errors: list[float] = []
    distances: list[float] = []
    jobs = tuple(
        random_job(10 * version.version + n, now.config.vocab_size, prompt_tokens=8 + 5 * n, tokens=24)
        for n in range(2)
    )
    calls = [Generate(jobs=jobs)] if started.lockstep else [Generate(jobs=(job,)) for job in jobs]
    samples = [sample for call in calls for sample in (await engine.draw(call)).samples]
    for job, sample in zip(jobs, samples, strict=True):
        assert {span.version for span in sample.spans} == {version}, sample.fault
        drawn = ints(sample.token_ids)
        wanted = logprobs_of(now, job.prompt_token_ids, drawn)
        errors += _distances(floats(sample.logprobs), wanted)
        distances += _distances(logprobs_of(before, job.prompt_token_ids, drawn), wanted)
    return errors, statistics.fmean(distances)


def _distances(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


async def memory(kind: EngineKind, directory: Path, *, swaps: int) -> Memory:
    """Resident memory after each of `swaps` swaps, with a batch between any two."""
    versions = Versions.of(random_model(Size(parameters=MEMORY_SIZE)), directory)
    rss_bytes = []
    async with running(kind, directory) as engine:
        started = await engine.start(versions, places=2)
        await engine.install(versions.publish())
        for number in range(swaps):
            step(versions.model, LEARNING_STEP, number)
            await engine.install(versions.publish())
            jobs = tuple(random_job(2 * number + n, 1024, prompt_tokens=8, tokens=8) for n in range(2))
            for call in [Generate(jobs=jobs)] if started.lockstep else [Generate(jobs=(job,)) for job in jobs]:
                await engine.draw(call)
            rss_bytes.append(engine.rss_bytes())
    versions.close()
    return Memory(rss_bytes=tuple(rss_bytes))


# -- caches that are computed again -----------------------------------------------------------------------------


SHORT_TOKENS = 16
"""Of a sample, so that a draw is a prefill and little else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """Prompts and completions of the samples; half-way through they have about 1,000 tokens."""

    prompt_tokens: int = 872
    tokens: int = 256

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """All places drew once. `ends` are the tokens at which each sample came to its last version."""

    seconds: float
    cpu_s: float
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redrawn:
    """Three draws, and the swap in the last of them."""

    short: Drawn
    whole: Drawn
    swapped: Drawn
    pause_s: float

    @property
    def fell_within(self) -> bool:
        """Whether the swap met all samples while they were drawn."""
        return min(self.swapped.ends) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Medians over the repeats. `context_tokens` is what a sample had when the swap met it, in the mean; `tokens_per_s`
    is of all places with such contexts."""

    parameters: int
    repeats: int
    places: int
    context_tokens: float
    prefill_s: float
    tokens_per_s: float
    pause_s: float
    lost_s: float
    min_lost_s: float
    max_lost_s: float
    lost_cpu_s: float

    @property
    def tokens_lost(self) -> float:
        return self.lost_s * self.tokens_per_s


async def recompute(
    kind: EngineKind, directory: Path, *, parameters: float, repeats: int, contexts: Contexts
) -> Recompute:
    """Time `repeats` swaps after one that is not counted. Raise EngineBroken if none fell within the samples."""
    vocab_size = 32_768 if parameters >= 1e8 else 1024
    size = Size(parameters=parameters, vocab_size=vocab_size, context_tokens=contexts.total)
    versions = Versions.of(random_model(size), directory)
    found = []
    async with running(kind, directory) as engine:
        await engine.start(versions, places=PLACES)
        await engine.install(versions.publish())
        for number in range(repeats + 1):
            step(versions.model, LEARNING_STEP, number)
            found.append(await _repeat(engine, versions.publish(), number, vocab_size, contexts))
    versions.close()
    counted = [one for one in found[1:] if one.fell_within]
    if not counted:
        raise EngineBroken("no swap fell within the samples: the machine is too busy to say what one costs")
    return summed_up(parameters_of(versions.model), counted, contexts)


async def _repeat(engine: EngineProcess, install: Install, number: int, vocab_size: int, contexts: Contexts) -> Redrawn:
    async def draw(kind: int, tokens: int) -> Drawn:
        return await _draw(engine, 3 * number + kind, vocab_size, contexts.prompt_tokens, tokens)

    short = await draw(0, SHORT_TOKENS)
    whole = await draw(1, contexts.tokens)
    installing = asyncio.create_task(_install_after(engine, install, (short.seconds + whole.seconds) / 2))
    swapped = await draw(2, contexts.tokens)
    return Redrawn(short=short, whole=whole, swapped=swapped, pause_s=(await installing).pause_s)


async def _install_after(engine: EngineProcess, install: Install, seconds: float) -> Installed:
    await asyncio.sleep(seconds)
    return await engine.install(install)


async def _draw(engine: EngineProcess, seed: int, vocab_size: int, prompt_tokens: int, tokens: int) -> Drawn:
    # Prompts of its own: vLLM keeps the caches of those it has seen.
    jobs = [
        random_job(PLACES * seed + place, vocab_size, prompt_tokens=prompt_tokens, tokens=tokens)
        for place in range(PLACES)
    ]
    began, spent_s = time.perf_counter(), engine.cpu_s()
    samples = (await engine.draw(Generate(jobs=tuple(jobs)))).samples
    return Drawn(
        seconds=time.perf_counter() - began,
        cpu_s=engine.cpu_s() - spent_s,
        ends=tuple(sample.spans[-1].start for sample in samples),
    )


def summed_up(parameters: int, repeats: Sequence[Redrawn], contexts: Contexts) -> Recompute:
    """Medians of what single repeats give."""
    median = statistics.median
    lost_s = [one.swapped.seconds - one.whole.seconds for one in repeats]
    drawn = PLACES * (contexts.tokens - SHORT_TOKENS)
    return Recompute(
        parameters=parameters,
        repeats=len(repeats),
        places=PLACES,
        context_tokens=contexts.prompt_tokens + statistics.fmean(end for one in repeats for end in one.swapped.ends),
        prefill_s=median(one.short.seconds for one in repeats),
        tokens_per_s=median(drawn / (one.whole.seconds - one.short.seconds) for one in repeats),
        pause_s=median(one.pause_s for one in repeats),
        lost_s=median(lost_s),
        min_lost_s=min(lost_s),
        max_lost_s=max(lost_s),
        lost_cpu_s=median(one.swapped.cpu_s - one.whole.cpu_s for one in repeats),
    )


# -- both --------------------------------------------------------------------------------------------------------


def _said(figures: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(figures), flush=True)
    return figures


async def measure(kind: EngineKind, directory: Path) -> dict[str, Any]:
    """All figures of swaps, said as they come; `met` is False if one of them misses its target."""
    times, found = list[dict[str, Any]](), list[dict[str, Any]]()
    for parameters in SIZES:
        one = await swap_times(kind, directory / f"times-{parameters:g}", parameters=parameters, swaps=7)
        times.append(_said(asdict(one) | {"tokens_lost": one.tokens_lost}))
    architectures: tuple[Architecture, ...] = ("qwen3", "llama")
    dtypes: tuple[EngineDtype, ...] = ("float32", "bfloat16")
    for dtype, architecture, tied in product(dtypes, architectures, (True, False)):
        at = directory / f"{architecture}-{tied}-{dtype}"
        held = await accuracy(kind, at, architecture=architecture, tied=tied, dtype=dtype, swaps=20)
        found.append(_said(asdict(held) | {"met": held.met}))
    rss = await memory(kind, directory / "memory", swaps=200)
    return {
        "swaps": times,
        "accuracy": found,
        **_said({"rss_mb": [round(one / 1e6, 1) for one in rss.rss_bytes], "rss_growth": rss.growth}),
        "met": rss.growth <= RSS_GROWTH and all(one["met"] for one in found),
    }


async def measure_recompute(kind: EngineKind, directory: Path) -> list[dict[str, Any]]:
    """What a swap costs models of all sizes with long contexts, said as it comes."""
    found = []
    for parameters in SIZES:
        at = directory / f"{parameters:g}"
        one = await recompute(kind, at, parameters=parameters, repeats=5, contexts=Contexts())
        found.append(_said(asdict(one) | {"tokens_lost": one.tokens_lost}))
    return found
