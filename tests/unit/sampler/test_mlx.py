"""The mlx engine in this process, on a CPU: what it computes against the learner's model, what it holds, what it
refuses. The conformance suite has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, Qwen2Config

pytest.importorskip("mlx_lm", reason="mlx-lm has no build for this system: bin/setup went on without it")

from swarm.errors import UserError
from swarm.models import draws as learner_draws
from swarm.models.memory import weights_bytes
from swarm.sampler.engine import NotInstalled
from swarm.sampler.mlx.draws import gumbel
from swarm.sampler.mlx.engine import MlxEngine
from swarm.sampler.mlx.model import Rounded
from swarm.sampler.room import shape_of_layout
from swarm.types import Rounding
from tests.unit import rows
from tests.unit.models import Staged, adapted_model, moe_model, published, stage, stage_model
from tests.unit.sampler.test_adapters import error_against

AUTO: Any = AutoModelForCausalLM
SHAPE: dict[str, Any] = {
    **{**rows.SHAPE, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 64, "initializer_range": 0.2},
}


def silent() -> None: ...


def configured(config: Any, directory: Path) -> Staged:
    torch.manual_seed(1)
    return stage_model(AUTO.from_config(config), directory)


def started(staged: Staged, **options: Any) -> MlxEngine:
    engine = MlxEngine()
    engine.start(staged.start(places=8, **options), silent)
    return engine


def installed(staged: Staged, **options: Any) -> MlxEngine:
    engine = started(staged, **options)
    assert engine.install(staged.install(), silent) in ("sums", "some sums", "rounding")
    return engine


def nbytes_of(engine: MlxEngine) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(engine._model.module.parameters()))


def hold_rounded(model: Any, how: Rounded) -> None:
    """Put in place of each matrix that is rounded the float32 numbers that it then stands for."""
    import mlx.core as mx

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ".lora_" not in name:
                packed, scales, offsets = how.round(mx.array(parameter.numpy()))
                scales, offsets = scales.astype(mx.float32), offsets.astype(mx.float32)
                held = mx.dequantize(packed, scales, offsets, group_size=how.group_size, bits=how.bits)
                parameter.copy_(torch.tensor(held.tolist()))


def test_the_noise_is_the_learner_s() -> None:
    seeds, positions = [0, 1, 2**62 + 5, 2**63 - 1], [0, 5, 100_000, 3]
    ours = torch.tensor(gumbel(seeds, positions, 5_000).tolist())
    assert (ours - learner_draws.gumbel(torch.tensor(seeds), torch.tensor(positions), 5_000)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["untied", "rope of its own", "experts"])
def test_the_learner_finds_its_log_probs_at_equal_version(kind: str, tmp_path: Path) -> None:
    """Files of transformers 5 leave out defaults and have other names for some settings than mlx-lm."""
    match kind:
        case "untied":
            staged = configured(Qwen2Config(**SHAPE, tie_word_embeddings=False), tmp_path)
        case "rope of its own":
            scaled = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
            scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
            staged = configured(LlamaConfig(**SHAPE, rope_parameters=scaled), tmp_path)
        case _:
            staged = stage_model(moe_model(3), tmp_path)
    assert error_against(published(staged.model), installed(staged)) < 1e-4


# -- proofs --------------------------------------------------------------------------------------------------


def proofs(engine: MlxEngine, staged: Staged) -> list[str]:
    return [str(engine.install(staged.install(version), silent)) for version in range(2)]


def test_sums_prove_what_it_holds(tmp_path: Path) -> None:
    staged = stage(tmp_path)
    assert proofs(started(staged), staged) == ["sums", "sums"]
    assert proofs(started(staged, precision="int8"), staged) == ["rounding", "rounding"]
    # mlx-lm stacks the experts, so they have no sums.
    experts = stage_model(moe_model(3), tmp_path / "experts")
    assert proofs(started(experts), experts) == ["some sums", "some sums"]
    assert proofs(started(experts, precision="int8"), experts) == ["some sums", "some sums"]


@pytest.mark.parametrize("precision", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.mlp.up_proj", "model.norm"])
def test_a_tensor_that_was_not_taken_is_found(
    precision: Rounding, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = stage(tmp_path / "old"), stage(tmp_path / "new", seed=5)
    with torch.no_grad():
        new.model.model.norm.weight += 0.5
    new = stage_model(new.model, tmp_path / "newer")
    engine = installed(old, precision=precision)
    module = engine._model.module
    load = type(module).load_weights

    def forgetting(self: Any, weights: list[tuple[str, Any]], strict: bool = True) -> Any:
        return load(self, [one for one in weights if not one[0].startswith(f"{name}.")], strict=strict)

    monkeypatch.setattr(type(module), "load_weights", forgetting)
    done = engine.install(new.install(1), silent)
    assert done == NotInstalled("engine", f"after the install {name}.weight differs from what the learner signed")


# -- rounded weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_it_draws_from_the_rounded_model_and_says_so(precision: Rounding, bits: int, tmp_path: Path) -> None:
    """Its log-probs are those of a model whose matrices are rounded, embeddings included, and no others."""
    staged = configured(LlamaConfig(**SHAPE), tmp_path)
    engine = MlxEngine()
    assert engine.start(staged.start(precision=precision), silent).precision == precision
    engine.install(staged.install(), silent)
    model = published(staged.model)
    exact = error_against(model, engine)
    hold_rounded(model, Rounded(64, bits))
    assert error_against(model, engine) < 1e-4 < exact
    assert nbytes_of(engine) < nbytes_of(started(staged)) * (bits + 1.2) / 32


# -- refusals ------------------------------------------------------------------------------------------------


NARROW = LlamaConfig(**{**SHAPE, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16})


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (LlamaConfig(**SHAPE), {"precision": "fp8"}, "int8 or int4, not to fp8"),
        (LlamaConfig(**SHAPE), {"device": "cuda:0"}, "or a cpu, not on cuda:0"),
        (LlamaConfig(**SHAPE), {"device": "mps"}, r"Apple's GPU \(mps, not here\)"),
        (
            BloomConfig(vocab_size=14, hidden_size=64, n_layer=2, n_head=2),
            {},
            r"mlx-lm cannot build .* take --engine transformers",
        ),
        (NARROW, {"precision": "int8"}, r"no matrix of this model .* leave out --precision"),
    ],
    ids=["fp8", "cuda", "mps", "a model that mlx-lm does not have", "too narrow to round"],
)
def test_what_it_cannot_do_is_said_at_the_start(
    config: Any, options: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        started(configured(config, tmp_path), **options)


def test_a_model_too_large_for_what_is_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.sampler.room.free_host_bytes", lambda: 760_000)
    with pytest.raises(UserError, match="--precision int4") as refused:
        started(stage(tmp_path), max_model_len=64)
    assert "--engine vllm" not in str(refused.value)
    assert "fp8" not in str(refused.value)
    assert started(stage(tmp_path / "again"), precision="int8", max_model_len=64)._started.places >= 4


# -- adapters ------------------------------------------------------------------------------------------------


def adapted(tmp_path: Path, count: int = 2) -> list[Staged]:
    return [stage_model(adapted_model(drawn=drawn), tmp_path / str(drawn)) for drawn in range(count)]


def test_experts_are_stacked_once_beside_an_adapter(tmp_path: Path) -> None:
    first, second = (
        stage_model(adapted_model(drawn=drawn, base=moe_model(3)), tmp_path / str(drawn)) for drawn in (0, 1)
    )
    engine = started(first)
    for version, (staged, proof) in enumerate(((first, "some sums"), (second, "sums"))):
        assert engine.install(staged.install(version), silent) == proof
        assert error_against(published(staged.model), engine) < 1e-4


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_base_is_rounded_and_the_adapter_is_not(precision: Rounding, tmp_path: Path) -> None:
    first, second = adapted(tmp_path)
    engine = installed(first, precision=precision)
    assert engine.install(second.install(1), silent) == "sums"
    model = published(second.model)
    exact = error_against(model, engine)
    hold_rounded(model, Rounded(64, {"int8": 8, "int4": 4}[precision]))
    assert error_against(model, engine) < 1e-4 < exact


def test_room_is_reckoned_with_the_adapter_as_it_is_held(tmp_path: Path) -> None:
    (staged,) = adapted(tmp_path, 1)
    for precision in ("none", "int8"):
        engine = started(staged, precision=precision)
        reckoned = weights_bytes(shape_of_layout(staged.layout), "float32", precision)
        assert nbytes_of(engine) == pytest.approx(reckoned, rel=0.1)
