"""The real vLLM with matrices that are rounded at each install: what it draws from, and what is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import UserError
from swarm.sampler.engine import Generate, NotInstalled, Sampled
from swarm.sampler.vllm.engine import VllmEngine
from swarm.sampler.vllm.rounding import computed_with, rounded_inputs
from swarm.types import Rounding
from tests.conformance import job, logprobs, tokens
from tests.unit.models import Staged, logprobs_of, published
from tests.vllm.support import end, installed, staged_pair, started

ERROR = 0.15
"""Of a log-prob in the mean, where a step of a token's input may go either way; those of another version are 1 off."""


def held_as(staged: Staged, precision: Rounding) -> Any:
    """The model in float32 with the matrices, and their inputs, that a rounded engine computes with."""
    model = published(staged.model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = computed_with(module.weight.data, precision)
            module.register_forward_pre_hook(lambda _, inputs: rounded_inputs(inputs[0], precision))
    return model


def off(model: Any, samples: tuple[Sampled, ...]) -> float:
    errors = [
        abs(one - other)
        for sampled in samples
        for one, other in zip(logprobs(sampled), logprobs_of(model, (1, 3, 4, 5), tokens(sampled)), strict=True)
    ]
    return sum(errors) / len(errors)


@pytest.mark.parametrize(
    ("precision", "kind", "tied", "error"),
    [
        ("int8", "qwen3", True, ERROR),
        # In bfloat16, and nothing but the matrices is rounded.
        pytest.param("int4", "llama", False, 0.05, marks=pytest.mark.long),
        pytest.param("fp8", "qwen3", False, ERROR, marks=pytest.mark.long),
    ],
)
async def test_each_version_is_rounded_as_it_is_installed(
    tmp_path: Path, precision: Rounding, kind: str, tied: bool, error: float
) -> None:
    pair = staged_pair(tmp_path, kind, tied=tied)
    engine = VllmEngine()
    try:
        if precision == "int4" and not torch.cpu._is_avx512_supported():
            with pytest.raises(UserError, match="with AVX-512, which this one lacks"):
                await started(engine, pair[0], precision=precision)
            return
        begun = await started(engine, pair[0], precision=precision)
        assert begun.precision == precision
        if precision == "int8" and not torch.cpu._is_vnni_supported():
            # Its int8 is far off there (0.38 nats in the mean), and what has to hold is that the probe says so.
            refused = await engine.install(pair[0].install(0), lambda: None)
            assert isinstance(refused, NotInstalled)
            assert "the probe's log-probs are off" in refused.why
            return
        for version in range(4):
            assert (await installed(engine, pair[version % 2], version)).proof == "sums and probe"
            answer = await engine.generate(Generate(tuple(job(seed, limit=40) for seed in range(6))), lambda: None)
            assert [sampled.fault for sampled in answer.samples] == [""] * 6
            new, old = (held_as(pair[one % 2], precision) for one in (version, version + 1))
            assert off(new, answer.samples) < error
            assert off(old, answer.samples) > 0.5
            # It is the rounded model that they are drawn from.
            assert off(published(pair[version % 2].model), answer.samples) > off(new, answer.samples)
    finally:
        end(engine)


@pytest.mark.long
async def test_rounded_matrices_of_other_weights_are_noticed(tmp_path: Path) -> None:
    if not torch.cpu._is_vnni_supported():
        pytest.skip("vLLM's int8 is far off on a CPU without VNNI, so that its first version is refused")
    pair = staged_pair(tmp_path)
    engine = VllmEngine("tests.vllm.extensions.StaleMatrices")
    try:
        await started(engine, pair[0], precision="int8")
        await installed(engine, pair[0], 0)
        done = await engine.install(pair[1].install(1), lambda: None)
        assert isinstance(done, NotInstalled)
        assert (done.fault, "the probe's log-probs are off" in done.why) == ("engine", True)
    finally:
        end(engine)
