"""The sampler's benchmark: its arithmetic, and short runs over real processes. No figure of speed is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.sampler import GROUP, Load, Repeat, Throughput, throughput
from benchmarks.sampler_models import Architecture, Size, Versions, parameters_of, random_model, step
from benchmarks.sampler_swaps import (
    BF16_MEAN_ERROR,
    FLOAT32_ERROR,
    PLACES,
    RSS_GROWTH,
    SHORT_TOKENS,
    Accuracy,
    Contexts,
    Drawn,
    Memory,
    Redrawn,
    accuracy,
    summed_up,
)
from tests.unit.models import logprobs_of, published

QUICK = Load(parameters=3e5, vocab_size=1024, context_tokens=64, places=4, samples=8, prompt_tokens=8, most_tokens=8)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_random_model_is_what_was_asked_for_and_the_same_for_a_seed(architecture: Architecture, tied: bool) -> None:
    model, again = (random_model(Size(parameters=2e6), architecture=architecture, tied=tied) for _ in range(2))
    assert model.config.model_type == architecture
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    assert parameters_of(model) == pytest.approx(2e6, rel=0.15)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("parameters", [1e6, 1e8, 6e8])
def test_models_of_all_sizes_are_near_their_size(parameters: float) -> None:
    size = Size(parameters=parameters, vocab_size=151_936 if parameters > 5e8 else 1024)
    assert parameters_of(random_model(size, device="meta")) == pytest.approx(parameters, rel=0.1)


def test_a_version_is_what_the_model_was_and_a_step_is_seen(tmp_path: Path) -> None:
    versions = Versions.of(random_model(Size(parameters=3e5)), tmp_path)
    first, before = versions.publish(), published(versions.model)
    step(versions.model, 0.01, 1)
    second = versions.publish()
    assert second.version > first.version
    assert second.tensor_sums != first.tensor_sums
    prompt, completion = (1, 2, 3), (4, 5, 6)
    assert logprobs_of(before, prompt, completion) != logprobs_of(published(versions.model), prompt, completion)
    step(versions.model, 1e-6, 2)
    versions.publish()
    assert 0 < versions.sent_share < 0.05
    versions.close()


def found(dtype: str, *, largest: float, mean: float, moved: float = 0.5) -> Accuracy:
    return Accuracy(
        architecture="llama", tied=True, dtype=dtype, swaps=2, max_error=largest, mean_error=mean, moved=moved
    )


def test_log_probs_are_judged_by_the_largest_error_or_the_mean_and_only_if_stale_ones_would_be_seen() -> None:
    assert found("float32", largest=FLOAT32_ERROR / 2, mean=1e-6).met
    assert not found("float32", largest=FLOAT32_ERROR, mean=1e-6).met
    assert found("bfloat16", largest=0.5, mean=BF16_MEAN_ERROR / 2).met
    assert not found("bfloat16", largest=0.5, mean=BF16_MEAN_ERROR).met
    assert not found("bfloat16", largest=0.1, mean=0.01, moved=0.05).met


def test_memory_is_flat_if_it_ends_as_it_was_once_it_had_settled() -> None:
    assert Memory(rss_bytes=(100,) * 20 + (500,) * 180).growth == 0.0
    assert Memory(rss_bytes=tuple(500 + n for n in range(200))).growth > RSS_GROWTH


def test_the_ratio_is_of_medians() -> None:
    both = Throughput(
        parameters=1,
        seats=1,
        node=tuple(Repeat(tokens=1000, seconds=1000 / rate, cpu_s=5.0) for rate in (90.0, 96.0, 10.0)),
        bare=tuple(Repeat(tokens=1000, seconds=1000 / rate, cpu_s=4.0) for rate in (100.0, 80.0, 1000.0)),
        load_average=0.1,
    )
    assert both.ratio == pytest.approx(0.9)
    assert both.cpu_ratio == pytest.approx(0.8)


def test_both_sides_draw_the_same_and_only_single_samples_differ_in_length() -> None:
    load = Load(parameters=1e6, vocab_size=50, context_tokens=64, places=4, samples=40, prompt_tokens=5, most_tokens=16)
    together, apart = load.jobs(lockstep=True, seed=1), load.jobs(lockstep=False, seed=1)
    assert {job.rules.max_new_tokens for job in together} == {16}
    lengths = {job.rules.max_new_tokens for job in apart}
    assert (min(lengths) >= 8, max(lengths) <= 16, len(lengths) > 4) == (True, True, True)
    assert all(len({job.prompt_token_ids for job in apart[at : at + GROUP]}) == 1 for at in range(0, 40, GROUP))
    assert apart == load.jobs(lockstep=False, seed=1) != load.jobs(lockstep=False, seed=2)


def test_a_swap_loses_the_pause_and_the_prefill_that_follows_it() -> None:
    def drawn(seconds: float, *ends: int) -> Drawn:
        return Drawn(seconds=seconds, cpu_s=seconds / 2, ends=ends)

    contexts = Contexts(prompt_tokens=100, tokens=SHORT_TOKENS + 40)
    repeat = Redrawn(short=drawn(1.0, 0), whole=drawn(3.0, 0), swapped=drawn(6.0, 20, 40), pause_s=0.25)
    lost = summed_up(7, [repeat], contexts)
    assert repeat.fell_within
    assert (lost.lost_s, lost.lost_cpu_s, lost.pause_s, lost.context_tokens) == (3.0, 1.5, 0.25, 130)
    assert lost.tokens_per_s == PLACES * 40 / 2
    assert lost.tokens_lost == 3.0 * lost.tokens_per_s


@pytest.mark.long
async def test_throughput_is_measured_through_the_node_and_without_it(tmp_path: Path) -> None:
    both = await throughput("transformers", tmp_path, QUICK, repeats=1)
    assert both.ratio > 0


@pytest.mark.long
async def test_log_probs_after_swaps_are_compared_with_those_of_the_published_weights(tmp_path: Path) -> None:
    held = await accuracy("transformers", tmp_path, architecture="llama", tied=False, dtype="float32", swaps=2)
    assert (held.dtype, held.swaps) == ("float32", 2)
    assert held.max_error < FLOAT32_ERROR < held.moved
