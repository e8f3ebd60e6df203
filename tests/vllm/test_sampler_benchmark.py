"""The sampler's benchmark times swaps with vLLM too. Figures of its own are made by hand, see RESULTS.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sampler import Contexts, recompute

pytestmark = pytest.mark.long

QUICK = Contexts(prompt_tokens=40, tokens=88)


async def test_a_swap_is_timed_until_samples_have_their_caches_again(tmp_path: Path) -> None:
    found = await recompute("vllm", tmp_path, parameters=3e5, repeats=2, contexts=QUICK)
    assert found["context_tokens"] > QUICK.prompt_tokens
    assert found["tokens_per_s"] > 0
    assert found["lost_cpu_s"] > 0
