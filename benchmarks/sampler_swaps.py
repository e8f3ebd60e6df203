"""Swaps of a version beneath an engine: what one takes, what it costs in tokens and memory, what is held after it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
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
from benchmarks.sampler_process import EngineProcess, kept_busy, random_job, running
from swarm.sampler.engine import EngineDtype, EngineKind, Generate, Started
from swarm.types import VersionId
from tests.unit.models import logprobs_of, published

LEARNING_STEP = 1e-6
"""Moves some percent of the bf16 weights by one unit, as a learner's step does: deltas of about a hundredth."""

VISIBLE_STEP = 0.01
"""Moves log-probs by 0.1 and more: an engine that kept a tensor of the old version would be seen."""

PLACES = 8

SIZES = (3e5, 1e6, 1e7, 1e8)
"""Parameters of the models whose swaps are timed."""

QUICK_SIZES = SIZES[:1]

MEMORY_SIZE = 5e6
"""Of the model that is swapped for memory: one copy left behind at each of 200 swaps would be 2 GB."""

SETTLED = 0.1
"""Part of the swaps after which memory is first looked at: allocators have grown to what they need by then."""

FLOAT32_ERROR = 1e-4
BF16_MEAN_ERROR = 0.02
RSS_GROWTH = 0.03
"""What passes for flat: of 500 MB not quite two copies of the weights, where 180 were made."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTimes:
    """Medians over the swaps of one model, in seconds: apply on the map, then of the engine's call its parts.

    Samples stand still for `pause_s`, which costs `tokens_lost` at the speed with all places filled: of samples with
    next to no context, since caches are not counted that are computed again (sampler_recompute.py)."""

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
    kind: EngineKind, directory: Path, *, parameters: float, swaps: int, device: str, dtype: EngineDtype = "auto"
) -> SwapTimes:
    """Time `swaps` swaps of a model of about so many parameters, one learner's step each, all places drawing."""
    vocab_size = 32_768 if parameters >= 1e8 else 1024
    versions = Versions.of(random_model(Size(parameters=parameters, vocab_size=vocab_size)), directory)
    async with running(kind, directory) as engine:
        started = await engine.start(versions, device=device, dtype=dtype, places=PLACES)
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
    device: str,
    parameters: float = 2e6,
) -> Accuracy:
    """Swap to another version `swaps` times, and compare what the engine says of it each time."""
    model = random_model(Size(parameters=parameters), architecture=architecture, tied=tied)
    versions = Versions.of(model, directory)
    errors: list[float] = []
    moved: list[float] = []
    async with running(kind, directory) as engine:
        started = await engine.start(versions, device=device, dtype=dtype, places=2)
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


async def memory(kind: EngineKind, directory: Path, *, swaps: int, device: str) -> Memory:
    """Resident memory after each of `swaps` swaps, with a batch between any two."""
    versions = Versions.of(random_model(Size(parameters=MEMORY_SIZE)), directory)
    rss_bytes = []
    async with running(kind, directory) as engine:
        started = await engine.start(versions, device=device, dtype="auto", places=2)
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


TIMES_HEADER = (
    "| parameters | sent | apply | pause | proof | install | tokens/s | lost in the pause |\n" + "|---" * 8 + "|"
)

ACCURACY_HEADER = (
    "| architecture | embeddings | dtype | swaps | largest error | mean error | moved by | |\n" + "|---" * 8 + "|"
)


def times_line(one: SwapTimes) -> str:
    """One row: milliseconds, and the proof that was given."""
    ms = [f"{1000 * seconds:.1f}" for seconds in (one.apply_s, one.pause_s)]
    columns = [
        f"{one.parameters / 1e6:.1f} M",
        f"{100 * one.sent_share:.1f} %",
        *ms,
        one.proof,
        f"{1000 * one.install_s:.1f}",
        f"{one.tokens_per_s:.0f}",
        f"{one.tokens_lost:.0f}",
    ]
    return "| " + " | ".join(columns) + " |"


def accuracy_line(one: Accuracy) -> str:
    columns = [
        one.architecture,
        "tied" if one.tied else "untied",
        one.dtype,
        str(one.swaps),
        f"{one.max_error:.1e}",
        f"{one.mean_error:.1e}",
        f"{one.moved:.2f}",
        "met" if one.met else "missed",
    ]
    return "| " + " | ".join(columns) + " |"


async def measure(
    kind: EngineKind,
    directory: Path,
    say: Say,
    *,
    device: str,
    quick: bool,
    dtypes: Sequence[EngineDtype],
    sizes: Sequence[float],
) -> dict[str, Any]:
    """All figures of swaps, said as they come; `met` is False if one of them misses its target."""
    say(TIMES_HEADER)
    times = []
    for parameters in sizes:
        at = directory / f"times-{parameters:g}"
        times.append(await swap_times(kind, at, parameters=parameters, swaps=3 if quick else 7, device=device))
        say(times_line(times[-1]))
    say(ACCURACY_HEADER)
    found = []
    kinds: list[tuple[Architecture, bool]] = list(product(("qwen3", "llama"), (True, False)))
    for dtype, (architecture, tied) in product(dtypes, kinds[:1] if quick else kinds):
        at = directory / f"{architecture}-{tied}-{dtype}"
        swaps = 3 if quick else 20
        found.append(
            await accuracy(kind, at, architecture=architecture, tied=tied, dtype=dtype, swaps=swaps, device=device)
        )
        say(accuracy_line(found[-1]))
    held = await memory(kind, directory / "memory", swaps=5 if quick else 200, device=device)
    # Five swaps are within what allocators need to settle.
    flat = quick or held.growth <= RSS_GROWTH
    say(
        f"resident memory over {len(held.rss_bytes)} swaps: {held.rss_bytes[0] / 1e6:.0f} to "
        f"{held.rss_bytes[-1] / 1e6:.0f} MB, {100 * held.growth:+.1f} % since it settled "
        f"(flat: at most {100 * RSS_GROWTH:g} %): {'met' if flat else 'missed'}"
    )
    return {
        "swaps": [asdict(one) | {"tokens_lost": one.tokens_lost} for one in times],
        "accuracy": [asdict(one) | {"met": one.met} for one in found],
        "rss_mb": [round(one / 1e6, 1) for one in held.rss_bytes],
        "rss_growth": held.growth,
        "swaps_met": flat and all(one.met for one in found),
    }
