"""The reference that an engine's probe is compared with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from swarm.sampler import proving
from swarm.sampler.proving import PROBE_TOKENS, Expected, Reference, probe_tokens
from swarm.sampler.weights import build_model
from tests.unit import rows
from tests.unit.models import Staged, logprobs_of, published, stage_model

AUTO: Any = AutoModelForCausalLM

SHAPE = {
    **{**rows.SHAPE, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    **{"max_position_embeddings": 64, "initializer_range": 0.2},
}


@pytest.fixture(params=[(kind, tied) for kind in (Qwen3Config, LlamaConfig) for tied in (True, False)])
def staged(request: pytest.FixtureRequest, tmp_path: Path) -> Staged:
    kind, tied = request.param
    torch.manual_seed(3)
    return stage_model(AUTO.from_config(kind(**SHAPE, tie_word_embeddings=tied)), tmp_path)


def test_it_computes_what_the_learner_s_model_does(staged: Staged) -> None:
    tokens = probe_tokens(14, 63)
    reference = Reference(str(staged.files_dir), staged.layout)
    for _ in range(2):
        expected = reference.expect(str(staged.staging), tokens)
        assert expected.logprobs == pytest.approx(
            logprobs_of(published(staged.model), tokens[:1], tokens[1:]), abs=1e-5
        )


def test_it_keeps_no_weights_and_one_layer_at_a_time(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def held() -> int:
        return sum(parameter.numel() for parameter in built[0].parameters() if not parameter.is_meta)

    def build(*given: Any) -> Any:
        built.append(build_model(*given))
        # Not even while it is made: it might not fit beside the engine.
        assert held() == 0
        return built[0]

    monkeypatch.setattr(proving, "build_model", build)
    reference = Reference(str(staged.files_dir), staged.layout)
    model = built[0]
    seen: list[int] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(held()))
    reference.expect(str(staged.staging), probe_tokens(14, 63))
    assert held() == 0
    assert max(seen) <= max(parameter.numel() for parameter in model.parameters())


def test_the_probe_is_the_same_everywhere_and_fits() -> None:
    assert probe_tokens(151_936, 40_960) == probe_tokens(151_936, 40_960)
    assert len(probe_tokens(14, 40_960)) == PROBE_TOKENS
    assert len(probe_tokens(14, 5)) == 5
    assert set(probe_tokens(14, 40_960)) <= set(range(14))


def off_by(errors: list[float], dtype: str, *, largest: float = 1.0) -> str | None:
    wanted = [random.Random(1).uniform(-9, 0) for _ in errors]
    held = [one + error for one, error in zip(wanted, errors, strict=True)]
    return Expected(wanted, [largest] * len(errors)).difference(held, dtype)


@pytest.mark.parametrize(
    ("errors", "dtype", "largest", "passes"),
    [
        ([0.9e-4, -0.9e-4, 0.0], "float32", 1.0, True),
        ([1.1e-4, 0.0, 0.0], "float32", 1.0, False),
        ([1.5e-4, 0.0, 0.0], "float32", 200.0, True),
        ([0.05, -0.005, 0.0], "bfloat16", 1.0, True),
        ([0.03, -0.03, 0.03], "bfloat16", 1.0, False),
        ([0.03, -0.03, 0.03], "bfloat16", 20.0, True),
        ([3.0, 2.0, 4.0], "bfloat16", 20.0, False),
        ([float("nan"), 0.0, 0.0], "float32", 1.0, False),
        ([0.0, 0.0, float("nan")], "float32", 1.0, False),
        ([0.0, 0.0, float("nan")], "bfloat16", 1.0, False),
    ],
)
def test_tolerances(errors: list[float], dtype: str, largest: float, passes: bool) -> None:
    assert (off_by(errors, dtype, largest=largest) is None) is passes


def test_an_answer_of_another_length_is_a_difference() -> None:
    assert Expected([-1.0, -2.0], [1.0, 1.0]).difference([-1.0], "float32") == "1 log-probs instead of 2"
