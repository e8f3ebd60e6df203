"""What a swap costs samples with long contexts: their caches go with the old weights and are computed again.

Each repeat draws three times with all places filled, each time for prompts of its own: a few tokens (`short`), all of
them undisturbed (`whole`), and all with a swap half-way (`swapped`). A swap loses the seconds by which `swapped` is
longer than `whole`: the pause, the prefill of all contexts, and what check and probe take of the machine meanwhile. The
speed from `short` to `whole` turns them into tokens. CPU seconds of the engine's processes hardly depend on what else
runs.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sampler_models import Size, Versions, parameters_of, random_model, step
from benchmarks.sampler_process import EngineBroken, EngineProcess, random_job, running
from benchmarks.sampler_swaps import LEARNING_STEP, PLACES
from swarm.sampler.engine import EngineKind, Generate, Install, Installed

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


QUICK = Contexts(prompt_tokens=40, tokens=88)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """All places drew once. `ends` are the tokens at which each sample came to its last version."""

    seconds: float
    cpu_s: float
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
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
    def tokens_recomputed(self) -> float:
        return self.places * self.context_tokens

    @property
    def tokens_lost(self) -> float:
        return self.lost_s * self.tokens_per_s


async def recompute(
    kind: EngineKind, directory: Path, *, parameters: float, repeats: int, device: str, contexts: Contexts
) -> Recompute:
    """Time `repeats` swaps after one that is not counted. Raise EngineBroken if none fell within the samples."""
    vocab_size = 32_768 if parameters >= 1e8 else 1024
    size = Size(parameters=parameters, vocab_size=vocab_size, context_tokens=contexts.total)
    versions = Versions.of(random_model(size), directory)
    found = []
    async with running(kind, directory) as engine:
        await engine.start(versions, device=device, dtype="auto", places=PLACES)
        await engine.install(versions.publish())
        for number in range(repeats + 1):
            step(versions.model, LEARNING_STEP, number)
            found.append(await _repeat(engine, versions.publish(), number, vocab_size, contexts))
    versions.close()
    counted = [one for one in found[1:] if one.fell_within]
    if not counted:
        raise EngineBroken("no swap fell within the samples: the machine is too busy to say what one costs")
    return summed_up(parameters_of(versions.model), counted, contexts)


async def _repeat(engine: EngineProcess, install: Install, number: int, vocab_size: int, contexts: Contexts) -> Repeat:
    async def draw(kind: int, tokens: int) -> Drawn:
        return await _draw(engine, 3 * number + kind, vocab_size, contexts.prompt_tokens, tokens)

    short = await draw(0, SHORT_TOKENS)
    whole = await draw(1, contexts.tokens)
    installing = asyncio.create_task(_install_after(engine, install, (short.seconds + whole.seconds) / 2))
    swapped = await draw(2, contexts.tokens)
    return Repeat(short=short, whole=whole, swapped=swapped, pause_s=(await installing).pause_s)


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


def summed_up(parameters: int, repeats: Sequence[Repeat], contexts: Contexts) -> Recompute:
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


HEADER = (
    "| parameters | context | prefilled again | pause | lost | by CPU time | tokens/s there | lost per swap |\n"
    + "|---" * 8
    + "|"
)


def line(one: Recompute) -> str:
    """One row: seconds, and the range of the repeats."""
    columns = [
        f"{one.parameters / 1e6:.1f} M",
        f"{one.context_tokens:.0f}",
        f"{one.tokens_recomputed:.0f} tokens",
        f"{one.pause_s:.2f}",
        f"{one.lost_s:.2f} ({one.min_lost_s:.2f} to {one.max_lost_s:.2f})",
        f"{one.lost_cpu_s:.2f}",
        f"{one.tokens_per_s:.0f}",
        f"{one.tokens_lost:.0f}",
    ]
    return "| " + " | ".join(columns) + " |"


async def measure(
    kind: EngineKind,
    directory: Path,
    say: Callable[[str], None],
    *,
    device: str,
    quick: bool,
    sizes: Sequence[float],
) -> dict[str, Any]:
    """The figures for models of these sizes, said as they come."""
    if kind != "vllm":
        say(f"{kind} installs between two batches: no cache is computed again")
        return {"recompute": []}
    say(HEADER)
    found = []
    for parameters in sizes:
        at = directory / f"{parameters:g}"
        contexts, repeats = (QUICK, 1) if quick else (Contexts(), 5)
        found.append(
            await recompute(kind, at, parameters=parameters, repeats=repeats, device=device, contexts=contexts)
        )
        say(line(found[-1]))
    return {"recompute": [asdict(one) | {"tokens_lost": one.tokens_lost} for one in found]}
