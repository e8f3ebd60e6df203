"""The sampler's benchmark: its arithmetic, and short runs over real processes. No figure of speed is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sampler import (
    FLOAT32_ERROR,
    PLACES,
    SHORT_TOKENS,
    Contexts,
    Drawn,
    Load,
    Redrawn,
    accuracy,
    memory,
    summed_up,
    swap_times,
    throughput,
)
from benchmarks.sampler_models import Size, parameters_of, random_model

QUICK = Load(parameters=3e5, context_tokens=64, places=4, samples=8, prompt_tokens=8, most_tokens=8)


@pytest.mark.parametrize("parameters", [1e6, 1e8, 6e8])
def test_models_of_all_sizes_are_near_their_size(parameters: float) -> None:
    size = Size(parameters=parameters, vocab_size=151_936 if parameters > 5e8 else 1024)
    assert parameters_of(random_model(size, device="meta")) == pytest.approx(parameters, rel=0.1)


def test_a_swap_loses_the_pause_and_the_prefill_that_follows_it() -> None:
    def drawn(seconds: float, *ends: int) -> Drawn:
        return Drawn(seconds=seconds, cpu_s=seconds / 2, ends=ends)

    repeat = Redrawn(short=drawn(1.0, 0), whole=drawn(3.0, 0), swapped=drawn(6.0, 20, 40), pause_s=0.25)
    lost = summed_up(7, [repeat], Contexts(prompt_tokens=100, tokens=SHORT_TOKENS + 40))
    assert [lost[name] for name in ("lost_s", "lost_cpu_s", "pause_s", "context_tokens")] == [3.0, 1.5, 0.25, 130]
    assert (lost["tokens_per_s"], lost["tokens_lost"]) == (PLACES * 20, 3.0 * PLACES * 20)


@pytest.mark.long
async def test_throughput_swaps_and_memory_are_measured(tmp_path: Path) -> None:
    both = await throughput("transformers", tmp_path / "throughput", QUICK, repeats=1)
    assert min(both["ratio"], both["cpu_ratio"]) > 0
    swaps = await swap_times("transformers", tmp_path / "swaps", parameters=3e5, swaps=2)
    assert min(swaps[name] for name in ("apply_s", "install_s", "pause_s", "tokens_lost")) > 0
    assert abs((await memory("transformers", tmp_path / "memory", swaps=10))["rss_growth"]) < 0.5
    held = await accuracy(
        "transformers", tmp_path / "log-probs", architecture="llama", tied=False, dtype="float32", swaps=2
    )
    assert held["met"]
    assert held["max_error"] < FLOAT32_ERROR < held["moved"]
