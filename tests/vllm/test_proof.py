"""Swaps of the real vLLM, proven: right ones of several architectures, and wrong ones that must not pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from swarm.errors import UserError
from swarm.sampler.engine import Generate, Installed, NotInstalled
from swarm.sampler.vllm import versions as vllm_versions
from swarm.sampler.vllm.engine import VllmEngine
from swarm.sampler.vllm.swap import UNPROVEN
from swarm.sampler.vllm.versions import EXTENSION
from tests.builders import v
from tests.conformance import PROMPT, job
from tests.unit.models import Staged, published
from tests.vllm.support import LENGTH, Signal, check_logprobs, end, installed, staged_pair, started

SWAPS = 5
EXTENSIONS = "tests.vllm.extensions"


@asynccontextmanager
async def running(extension: str = EXTENSION) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(extension)
    try:
        yield engine
    finally:
        end(engine)


async def summed(engine: VllmEngine, staged: Staged) -> set[str]:
    """The tensors that the engine still holds as they came."""
    layout = msgspec.json.encode(msgspec.structs.replace(staged.layout, files=()))
    answers = await engine._engine.collective_rpc("echo_sums", args=(layout,))
    return set.intersection(*(set(msgspec.json.decode(answer)) for answer in answers))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("qwen3", False),
        ("padded moe", False),
        ("llama", True),
        ("llama", False),
    ],
)
async def test_after_each_of_several_swaps_log_probs_are_the_new_weights(tmp_path: Path, kind: str, tied: bool) -> None:
    """Of a tied Qwen3 test_vllm_engine.py shows it."""
    pair = staged_pair(tmp_path, kind, tied=tied)
    async with running() as engine:
        await started(engine, pair[0])
        for version in range(SWAPS):
            done = await installed(engine, pair[version % 2], version)
            assert done.proof == "sums and probe"
            asked = tuple(job(seed, limit=30, temperature=(1.0, 0.7)[seed % 2]) for seed in range(4))
            answer = await engine.generate(Generate(asked), lambda: None)
            for one, sampled in zip(asked, answer.samples, strict=True):
                check_logprobs(one, sampled, {v(version): pair[version % 2]})


async def test_a_tied_head_that_keeps_the_old_weights_is_noticed(tmp_path: Path) -> None:
    """The cure is in EchoWorker.echo_pack_embeddings; this worker does without it."""
    pair = staged_pair(tmp_path)
    async with running(f"{EXTENSIONS}.OldHead") as engine:
        await started(engine, pair[0])
        done = await engine.install(pair[0].install(0), lambda: None)
        assert isinstance(done, NotInstalled)
        assert done.fault == "engine"
        assert "the probe's log-probs are off" in done.why


def test_a_loader_is_given_what_a_checkpoint_holds_as_views_of_the_map(tmp_path: Path) -> None:
    staged = staged_pair(tmp_path, "qwen3 moe", tied=False)[0]
    published(staged.model).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    # As in an engine: vLLM reads its environment as it is imported.
    vllm_versions.prepare(is_cuda=False, is_small=True)
    from swarm.sampler.vllm.extension import _named

    given = dict(_named(str(staged.staging), staged.layout))
    assert given.keys() == saved.keys()
    assert all(torch.equal(given[name], saved[name]) for name in saved)
    assert len({tensor.untyped_storage().data_ptr() for tensor in given.values()}) == 1


@pytest.mark.long
async def test_experts_are_taken_and_proven_by_sums(tmp_path: Path) -> None:
    """A worker's experts are packed on CPUs, which changes only the order of their numbers."""
    pair = staged_pair(tmp_path, "qwen3 moe")
    async with running(f"{EXTENSIONS}.FlippingExpert") as engine:
        await started(engine, pair[0])
        for version in (0, 1):
            assert (await installed(engine, pair[version], version)).proof == "sums and probe"
            asked = tuple(job(seed, limit=30) for seed in range(4))
            answer = await engine.generate(Generate(asked), lambda: None)
            for one, sampled in zip(asked, answer.samples, strict=True):
                check_logprobs(one, sampled, {v(version): pair[version]})
        experts = {spec.name for spec in pair[0].layout.tensors if ".experts." in spec.name}
        assert experts <= await summed(engine, pair[0])
        done = await engine.install(pair[0].install(2), lambda: None)
        assert isinstance(done, NotInstalled)
        assert "layers.1.mlp.experts.gate_up_proj differs" in done.why


@pytest.mark.long
async def test_a_bit_that_flips_in_fused_weights_is_found_by_the_sums_and_nothing_of_it_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_NODE_TEST_KEEP_WEIGHTS", "1")
    pair = staged_pair(tmp_path, "llama", tied=False)
    async with running(f"{EXTENSIONS}.Flipping") as engine:
        await started(engine, pair[0])
        assert (await installed(engine, pair[0], 0)).proof == "sums and probe"
        await installed(engine, pair[1], 1)
        assert await summed(engine, pair[0]) == {spec.name for spec in pair[0].layout.tensors}
        drawing = Signal()
        sample = asyncio.create_task(engine.generate(Generate((job(0, limit=900, stops=()),)), drawing))
        await drawing.told()
        done = await engine.install(pair[0].install(2), lambda: None)
        assert isinstance(done, NotInstalled)
        assert done.fault == "engine"
        assert "self_attn.k_proj.weight differs" in done.why
        assert (await sample).samples[0].fault == UNPROVEN
        (after,) = (await engine.generate(Generate((job(0),)), lambda: None)).samples
        assert after.fault.startswith(UNPROVEN)
        again = await engine.install(pair[1].install(3), lambda: None)
        assert isinstance(again, NotInstalled)


@pytest.mark.long
async def test_shards_of_two_workers_sum_up_and_what_both_hold_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head of keys and values for two workers: both hold it."""
    monkeypatch.setenv("ECHO_NODE_TEST_KEEP_WEIGHTS", "1")
    pair = staged_pair(tmp_path, num_key_value_heads=1)
    async with running(f"{EXTENSIONS}.Flipping") as engine:
        await started(engine, pair[0], tensor_parallel_size=2)
        for version in (0, 1):
            assert (await installed(engine, pair[version], version)).proof == "sums and probe"
        assert await summed(engine, pair[0]) == {spec.name for spec in pair[0].layout.tensors}
        asked = job(0, limit=30)
        (sampled,) = (await engine.generate(Generate((asked,)), lambda: None)).samples
        check_logprobs(asked, sampled, {v(1): pair[1]})


@pytest.mark.long
async def test_a_reload_that_fails_gives_up_the_samples_beneath_it(tmp_path: Path) -> None:
    pair = staged_pair(tmp_path)
    async with running(f"{EXTENSIONS}.Refusing") as engine:
        await started(engine, pair[0])
        assert isinstance(await engine.install(pair[0].install(0), lambda: None), Installed)
        drawing = Signal()
        sample = asyncio.create_task(engine.generate(Generate((job(0, limit=900, stops=()),)), drawing))
        await drawing.told()
        done = await engine.install(pair[1].install(1), lambda: None)
        assert isinstance(done, NotInstalled)
        assert done.fault == "engine"
        assert "no such tensor" in done.why
        assert (await sample).samples[0].fault == UNPROVEN


@pytest.mark.long
async def test_a_cache_that_holds_no_sample_is_said_with_what_to_change(tmp_path: Path) -> None:
    pair = staged_pair(tmp_path)
    async with running() as engine:
        with pytest.raises(UserError, match=r"holds \d+ tokens, and one sample was to take 1024: set max_model_len"):
            await started(engine, pair[0], max_model_len=LENGTH, arguments={"kv_cache_memory_bytes": 512 << 10})


@pytest.mark.long
async def test_where_no_length_was_asked_for_samples_are_as_long_as_the_cache_holds(tmp_path: Path) -> None:
    pair = staged_pair(tmp_path)
    async with running() as engine:
        shortened = await started(engine, pair[0], arguments={"kv_cache_memory_bytes": 512 << 10})
        assert 0 < shortened.context_tokens < LENGTH
        await installed(engine, pair[0], 0)
        fits = job(0, limit=shortened.context_tokens - len(PROMPT), stops=())
        long = job(0, limit=shortened.context_tokens, stops=())
        answer = await engine.generate(Generate((fits, long)), lambda: None)
        check_logprobs(fits, answer.samples[0], {v(0): pair[0]})
        assert f"over this engine's max_model_len of {shortened.context_tokens}" in answer.samples[1].fault


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"arguments": {"no_such_thing": 1}}, "vLLM has no argument 'no_such_thing'"),
        ({"arguments": {"logprobs_mode": "raw_logprobs"}}, "'logprobs_mode' cannot be set: log-probs would"),
        ({"arguments": {"load_format": "auto"}}, "'load_format' cannot be set: weights come from the swarm"),
        ({"arguments": {"trust_remote_code": True}}, "runs no code that came with a model"),
        ({"arguments": {"kv_offloading_backend": "lmcache"}}, "'kv_offloading_backend' cannot be set: what it keeps"),
        ({"arguments": {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}}, "outlives the weights"),
        ({"arguments": {"distributed_executor_backend": "ray"}}, "cannot be set: an engine is on one machine"),
        ({"arguments": {"nnodes": 2}}, "'nnodes' cannot be set: an engine is on one machine: over the internet"),
        ({"arguments": {"pipeline_parallel_size": 2}}, "GPUs of one machine share a model by --tensor-parallel-size"),
        ({"arguments": {"quantization": "fp8"}}, "'quantization' cannot be set: it has an option of its own"),
        ({"arguments": {"block_size": "many"}}, "vLLM cannot be started with these options"),
        ({"max_model_len": 4096}, "vLLM cannot be started with these options"),
    ],
)
async def test_options_that_cannot_be_are_refused_by_name(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        await started(VllmEngine(), staged_pair(tmp_path)[0], **options)
