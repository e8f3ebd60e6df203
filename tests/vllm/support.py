"""Small models of the architectures that are tested, an engine over them, and what transformers makes of its draws."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from swarm.learner.adapter import attach
from swarm.sampler.engine import Installed, Job, Sampled, Started
from swarm.sampler.vllm.engine import VllmEngine
from swarm.types import VersionId
from tests.conformance import logprobs, tokens
from tests.unit.models import Staged, logprobs_of, published, stage_model

LENGTH = 1024
"""Long enough for a swap to fall into a sample."""

ERROR = 1e-4
"""Of a log-prob in float32."""

SHAPE: Mapping[str, Any] = {
    "vocab_size": 14,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LENGTH,
    # Wide enough for two seeds to differ by more than any tolerance.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

AUTO: Any = AutoModelForCausalLM

MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "qwen3 moe": partial(Qwen3MoeConfig, moe_intermediate_size=32, **MOE),
    # Its experts' kernel for CPUs pads them to 64 rows.
    "padded moe": partial(Qwen3MoeConfig, moe_intermediate_size=48, **MOE),
}


def staged_pair(directory: Path, kind: str = "qwen3", *, tied: bool = True, **shape: int) -> tuple[Staged, Staged]:
    """Two versions of one random model."""
    pair = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AUTO.from_config(CONFIGS[kind](**{**SHAPE, **shape}, tie_word_embeddings=tied))
        pair.append(stage_model(model, directory / str(seed)))
    return pair[0], pair[1]


def staged_adapters(
    directory: Path, count: int, kind: str = "qwen3", *, rank: int = 4, alpha: float = 8.0, tied: bool = True
) -> list[Staged]:
    """Versions of an adapter of one random model that is not zero but in version 0."""
    torch.manual_seed(0)
    model = AUTO.from_config(CONFIGS[kind](**SHAPE, tie_word_embeddings=tied))
    attach(model, rank, alpha, name="random", seed=0)
    model.float()
    staged = []
    for version in range(count):
        draw = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if version and ".lora_B." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)
        staged.append(stage_model(copy.deepcopy(model), directory / str(version)))
    return staged


async def started(engine: VllmEngine, staged: Staged, *, places: int = 8, **options: Any) -> Started:
    return await engine.start(staged.start(places=places, **options), lambda: None)


def end(engine: VllmEngine) -> None:
    """End vLLM's processes, which end with the sampler's in a run."""
    if engine._engine is not None:
        engine._engine.shutdown(timeout=1.0)


async def installed(engine: VllmEngine, staged: Staged, version: int) -> Installed:
    done = await engine.install(staged.install(version), lambda: None)
    assert isinstance(done, Installed), done
    return done


def check_logprobs(job: Job, sampled: Sampled, models: Mapping[VersionId, Staged]) -> None:
    """Every token's log-prob is, to within ERROR, the one that the version of its span gives it."""
    assert sampled.fault == ""
    drawn, noted = tokens(sampled), logprobs(sampled)
    assert [span.start for span in sampled.spans] == [0, *(span.end for span in sampled.spans[:-1])]
    assert sampled.spans[-1].end == len(drawn) == len(noted)
    for span in sampled.spans:
        learner = published(models[span.version].model)
        temperature = job.rules.temperature or 1.0
        expected = logprobs_of(learner, job.prompt_token_ids, drawn, temperature=temperature)
        assert noted[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=ERROR)


class Signal:
    """A `progress` to wait for: that tokens are being drawn."""

    def __init__(self) -> None:
        self._told = asyncio.Event()

    def __call__(self) -> None:
        self._told.set()

    async def told(self) -> None:
        self._told.clear()
        await asyncio.wait_for(self._told.wait(), 60)
