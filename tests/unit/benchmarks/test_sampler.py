"""The sampler's benchmark: its arithmetic, and short runs over real processes. No figure of speed is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import sampler
from benchmarks.sampler_models import (
    Architecture,
    Size,
    Versions,
    parameters_of,
    random_model,
    step,
)
from benchmarks.sampler_recompute import SHORT_TOKENS, Contexts, Drawn, summed_up
from benchmarks.sampler_recompute import Repeat as SwapRepeat
from benchmarks.sampler_swaps import BF16_MEAN_ERROR, FLOAT32_ERROR, PLACES, RSS_GROWTH, Accuracy, Memory, SwapTimes
from benchmarks.sampler_swaps import accuracy as measured_accuracy
from benchmarks.sampler_throughput import GROUP, Load, Repeat, Throughput
from tests.unit.models import logprobs_of, published

SMALL = Size(parameters=3e5)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_random_model_is_what_was_asked_for_and_the_same_for_a_seed(architecture: Architecture, tied: bool) -> None:
    model, again = (random_model(Size(parameters=2e6), architecture=architecture, tied=tied) for _ in range(2))
    assert model.config.model_type == architecture
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    assert parameters_of(model) == pytest.approx(2e6, rel=0.15)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("parameters", [1e6, 1e7, 1e8, 6e8, 1.5e9])
def test_models_of_all_sizes_are_near_their_size(parameters: float) -> None:
    size = Size(parameters=parameters, vocab_size=151_936 if parameters > 5e8 else 1024)
    assert parameters_of(random_model(size, device="meta")) == pytest.approx(parameters, rel=0.1)


def test_a_version_is_what_the_model_was_and_a_step_is_seen(tmp_path: Path) -> None:
    versions = Versions.of(random_model(SMALL), tmp_path)
    first = versions.publish()
    assert versions.holds_what_was_published()
    before = published(versions.model)
    step(versions.model, 0.01, 1)
    second = versions.publish()
    assert versions.holds_what_was_published()
    assert second.version > first.version
    assert second.tensor_sums != first.tensor_sums
    assert versions.apply_s > 0
    prompt, completion = (1, 2, 3), (4, 5, 6)
    assert logprobs_of(before, prompt, completion) != logprobs_of(published(versions.model), prompt, completion)
    step(versions.model, 1e-6, 2)
    versions.publish()
    assert 0 < versions.sent_share < 0.05
    versions.close()


def accuracy(dtype: str, *, largest: float, mean: float, moved: float = 0.5) -> Accuracy:
    return Accuracy(
        architecture="llama", tied=True, dtype=dtype, swaps=2, max_error=largest, mean_error=mean, moved=moved
    )


def test_log_probs_are_judged_by_the_largest_error_or_the_mean_and_only_if_stale_ones_would_be_seen() -> None:
    assert accuracy("float32", largest=FLOAT32_ERROR / 2, mean=1e-6).met
    assert not accuracy("float32", largest=FLOAT32_ERROR, mean=1e-6).met
    assert accuracy("bfloat16", largest=0.5, mean=BF16_MEAN_ERROR / 2).met
    assert not accuracy("bfloat16", largest=0.5, mean=BF16_MEAN_ERROR).met
    assert not accuracy("bfloat16", largest=0.1, mean=0.01, moved=0.05).met


def test_memory_is_flat_if_it_ends_as_it_was_once_it_had_settled() -> None:
    assert Memory(rss_bytes=(100,) * 20 + (500,) * 180).growth == 0.0
    assert Memory(rss_bytes=tuple(500 + n for n in range(200))).growth == pytest.approx(159.5 / 529.5 + 1e-3, abs=0.05)
    assert Memory(rss_bytes=tuple(500 + n for n in range(200))).growth > RSS_GROWTH
    assert Memory(rss_bytes=(5,)).growth == 0.0


def test_tokens_are_lost_while_samples_stand_still() -> None:
    times = SwapTimes(
        parameters=1,
        weight_bytes=2,
        sent_share=0.01,
        apply_s=1.0,
        install_s=2.0,
        pause_s=0.25,
        proof="sums",
        tokens_per_s=400.0,
    )
    assert times.tokens_lost == 100.0


def test_the_ratio_is_of_medians() -> None:
    found = Throughput(
        parameters=1,
        seats=1,
        node=tuple(Repeat(tokens=1000, seconds=1000 / rate, cpu_s=5.0) for rate in (90.0, 96.0, 10.0)),
        bare=tuple(Repeat(tokens=1000, seconds=1000 / rate, cpu_s=4.0) for rate in (100.0, 80.0, 1000.0)),
        load_average=0.1,
    )
    assert found.ratio == pytest.approx(0.9)
    assert found.cpu_ratio == pytest.approx(0.8)


def test_both_sides_draw_the_same_and_only_single_samples_differ_in_length() -> None:
    load = Load(parameters=1e6, vocab_size=50, context_tokens=64, places=4, samples=40, prompt_tokens=5, most_tokens=16)
    together, apart = load.jobs(lockstep=True, seed=1), load.jobs(lockstep=False, seed=1)
    assert len(together) == len(apart) == 40
    assert {job.rules.max_new_tokens for job in together} == {16}
    lengths = {job.rules.max_new_tokens for job in apart}
    assert (min(lengths) >= 8, max(lengths) <= 16, len(lengths) > 4) == (True, True, True)
    assert all(len({job.prompt_token_ids for job in apart[at : at + GROUP]}) == 1 for at in range(0, 40, GROUP))
    assert apart == load.jobs(lockstep=False, seed=1) != load.jobs(lockstep=False, seed=2)


def test_what_is_missed_is_told_by_the_exit_status() -> None:
    assert sampler.met({"swaps_met": True, "throughput_met": True}, quick=False)
    assert not sampler.met({"swaps_met": True, "throughput_met": False}, quick=False)
    assert sampler.met({"swaps_met": True, "throughput_met": False}, quick=True)
    assert not sampler.met({"swaps_met": False}, quick=True)


@pytest.mark.long
def test_a_quick_run_measures_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    assert sampler.main(["--engine", "transformers", "--quick", "--parts", "throughput", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["met"]
    assert figures["throughput_ratio"] > 0


@pytest.mark.long
async def test_log_probs_after_swaps_are_compared_with_those_of_the_published_weights(tmp_path: Path) -> None:
    found = await measured_accuracy(
        "transformers", tmp_path, architecture="llama", tied=False, dtype="float32", swaps=2, device="cpu"
    )
    assert (found.dtype, found.swaps) == ("float32", 2)
    assert found.max_error < FLOAT32_ERROR < found.moved


def drawn(seconds: float, *ends: int) -> Drawn:
    return Drawn(seconds=seconds, cpu_s=seconds / 2, ends=ends)


def test_a_swap_loses_the_pause_and_the_prefill_that_follows_it() -> None:
    contexts = Contexts(prompt_tokens=100, tokens=SHORT_TOKENS + 40)
    repeat = SwapRepeat(short=drawn(1.0, 0), whole=drawn(3.0, 0), swapped=drawn(6.0, 20, 40), pause_s=0.25)
    found = summed_up(7, [repeat], contexts)
    assert repeat.fell_within
    assert (found.lost_s, found.lost_cpu_s, found.pause_s, found.context_tokens) == (3.0, 1.5, 0.25, 130)
    assert found.tokens_per_s == PLACES * 40 / 2
    assert found.tokens_lost == 3.0 * found.tokens_per_s
    assert found.tokens_recomputed == PLACES * 130


def test_a_swap_that_came_after_a_sample_does_not_count() -> None:
    repeat = SwapRepeat(short=drawn(1.0, 0), whole=drawn(3.0, 0), swapped=drawn(6.0, 20, 0), pause_s=0.25)
    assert not repeat.fell_within
