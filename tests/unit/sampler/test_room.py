"""Whether a model and a few samples fit, reckoned from its layout: against real models, and for machines there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from swarm.broadcast.version.manifest import Layout, ModelFile
from swarm.errors import UserError
from swarm.learner.memory import shape_of
from swarm.learner.tiny import tiny_model
from swarm.models import device
from swarm.models.memory import Shape, sample_bytes, weights_bytes
from swarm.sampler import room
from swarm.sampler.engine import EngineOptions
from swarm.sampler.room import CPU_PLACES, Device, places, reckon, shape_of_layout
from swarm.sampler.transformers import TransformersEngine
from swarm.types import Rounding
from tests.builders import layout
from tests.unit.models import adapted_model, moe_model, stage, stage_model

GIB = 1 << 30


def qwen3(*, rounded: int, others: int, layers: int, hidden: int, feed_forward: int, heads: int) -> Shape:
    return Shape(
        parameters=rounded + others,
        layer_parameters=rounded // layers,
        other_parameters=others,
        layers=layers,
        hidden=hidden,
        feed_forward=feed_forward,
        queries=128 * heads,
        keys=1024,
        vocab_size=151_936,
        rounded=rounded,
        context_tokens=40_960,
    )


QWEN3_600M = qwen3(rounded=440_401_920, others=155_648_000, layers=28, hidden=1024, feed_forward=3072, heads=16)
QWEN3_8B = qwen3(rounded=6_945_767_424, others=1_244_967_936, layers=36, hidden=4096, feed_forward=12_288, heads=32)


def machine(free_gib: float, **changes: Any) -> Device:
    given: dict[str, Any] = {"where": "this machine", "share": 0.5, "max_places": CPU_PLACES, "dtype": "bfloat16"}
    return Device(free_bytes=int(free_gib * GIB), **{**given, **changes})


def gpu(free_gib: float) -> Device:
    return machine(free_gib, where="the GPU", share=1.0, max_places=512, lighter="--precision int4")


GPT2: Any = GPT2LMHeadModel
MAMBA: Any = MambaForCausalLM
MODELS: dict[str, Any] = {
    "qwen3": lambda: tiny_model(0),
    "experts": lambda: moe_model(0),
    "gpt2": lambda: GPT2(GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=50, n_positions=32)),
    "mamba": lambda: MAMBA(MambaConfig(hidden_size=64, num_hidden_layers=3, vocab_size=50)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_layout_tells_of_a_model_what_the_model_itself_does(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    found, own = shape_of_layout(stage_model(model, tmp_path).layout), shape_of(model)
    assert found.context_tokens == (getattr(model.config, "max_position_embeddings", None) or 0)
    # Norms and biases are all that stays of a layer.
    assert 0.9 < found.rounded / (own.parameters - own.other_parameters) <= 1.0
    same = dataclasses.replace(found, trained=own.trained, rounded=0, context_tokens=0)
    assert same == own


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        *((nothing, 64) for nothing in (None, b"{", b"[1]", b'{"text_config": 3}')),
        (b'{"hidden_size": -1, "vocab_size": "x"}', 64),
        (b'{"text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}}', 16),
    ],
)
def test_where_a_configuration_says_nothing_it_is_guessed_on_the_high_side_and_of_a_model_with_eyes_the_text_counts(
    config: bytes | None, keys: int
) -> None:
    tensors = layout(("embed.weight", "BF16", (50, 64)), ("layers.0.w.weight", "BF16", (64, 8))).tensors
    files = () if config is None else (ModelFile(name="config.json", content=config),)
    found = shape_of_layout(Layout(tensors=tensors, files=files))
    assert (found.rounded, found.other_parameters, found.layers, found.keys) == (512, 3200, 1, keys)
    assert (found.vocab_size, found.context_tokens) == (50, 0)


def test_a_sample_takes_its_keys_and_values_and_one_draw() -> None:
    # Of one token in bf16: 2 x 28 layers x 8 heads x 128 x 2 bytes = 114,688.
    assert sample_bytes(QWEN3_600M, 4096, "bfloat16") == 114_688 * 4096 + 8 * 4 * 151_936


@pytest.mark.parametrize(
    ("dtype", "precision", "gigabytes"),
    [("float32", "none", 32.8), ("bfloat16", "none", 16.4), ("bfloat16", "int8", 9.5), ("bfloat16", "int4", 6.4)],
)
def test_embeddings_and_the_head_are_not_rounded(dtype: str, precision: Rounding, gigabytes: float) -> None:
    assert weights_bytes(QWEN3_8B, dtype, precision) == pytest.approx(gigabytes * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("free_gib", "wanted", "limit", "expected"),
    [
        # (29.9 GiB - 1.19e9) / 2 / (114,688 x 4,096 + 4.9e6) = 32.6
        (29.9, 64, None, 32),
        (29.9, 8, 4096, 8),
        (29.9, None, None, 32),
        # 15.5e9 / (114,688 x 40,960 + 4.9e6) = 3.3: no sample is longer than the context.
        (29.9, 3, 1_000_000, 3),
        # 15.5e9 / (114,688 x 512 + 4.9e6) = 242
        (29.9, None, 512, CPU_PLACES),
        (29.9, 200, 512, 200),
    ],
)
def test_as_many_samples_as_fit_and_no_more_than_are_wanted(
    free_gib: float, wanted: int | None, limit: int | None, expected: int
) -> None:
    assert places(QWEN3_600M, machine(free_gib), EngineOptions(max_model_len=limit, places=wanted)) == expected


def test_a_run_of_short_samples_has_more_places() -> None:
    few, many = (places(QWEN3_8B, machine(24), EngineOptions(sample_tokens=tokens)) for tokens in (0, 64))
    assert (few, many) == (places(QWEN3_8B, machine(24), EngineOptions(sample_tokens=8192)), CPU_PLACES)
    assert few < many


LAST = "a smaller --max-model-len, end what else runs there, or help with --role relay"


@pytest.mark.parametrize(
    ("device", "changes"),
    [
        (gpu(16.4), f"--precision int4, --batch-samples 2, {LAST}"),
        (gpu(6.2), f"--precision int4, {LAST}"),
        (machine(24.0, dtype="float32"), f"--precision bfloat16, {LAST}"),
        (machine(4.0), LAST),
    ],
)
def test_too_little_memory_is_said_with_what_may_be_changed(device: Device, changes: str) -> None:
    with pytest.raises(UserError, match="too little memory") as refused:
        places(QWEN3_8B, device, EngineOptions())
    line = str(refused.value)
    assert line.partition("change: ")[2] == changes
    assert "\n" not in line
    if "--batch-samples" in changes:
        assert places(QWEN3_8B, device, EngineOptions(places=2)) == 2


def test_an_engine_is_not_begun_where_its_model_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = stage(tmp_path)
    weights = sum(parameter.nbytes for parameter in staged.model.parameters())
    monkeypatch.setattr(room, "free_host_bytes", lambda: weights)
    said = r"this machine has 0\.\d MiB free, and the swarm's model takes 0\.\d MiB in float32"
    with pytest.raises(UserError, match=said):
        TransformersEngine().start(staged.start(), lambda: None)
    monkeypatch.setattr(room, "free_host_bytes", lambda: 4 * weights)
    told = reckon("transformers", staged.layout, EngineOptions(device="cpu"))
    assert TransformersEngine().start(staged.start(), lambda: None).places == told.places
    assert f"{told.places} samples of 128 tokens" in told.said


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [(100, 0.85, 0.85), (100, 1.0, 1.0), (75, 0.85, 0.73), (90, 0.85, 0.85), (1, 0.85, 0.0)],
)
def test_a_gpu_that_others_use_is_shared_with_them(free: int, wanted: float, expected: float) -> None:
    assert room.vllm_share(free * GIB // 100, GIB, wanted) == pytest.approx(expected, abs=0.011)


def test_an_install_of_experts_in_mlx_has_them_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm has no build for this system: bin/setup went on without it")
    moe = stage_model(moe_model(0), tmp_path).layout
    experts = sum(tensor.nbytes for tensor in moe.tensors if len(tensor.shape) > 2)
    assert experts > 0
    asked = EngineOptions(device="cpu")
    sample = 2 * sample_bytes(shape_of_layout(moe), room.sample_tokens(shape_of_layout(moe), asked), "float32")
    least = weights_bytes(shape_of_layout(moe), "float32", "none") + room.FEW * sample
    monkeypatch.setattr(room, "free_host_bytes", lambda: least + experts)
    assert reckon("mlx", moe, asked).places == room.FEW
    monkeypatch.setattr(room, "free_host_bytes", lambda: least + experts - sample)
    with pytest.raises(UserError, match="too little memory"):
        reckon("mlx", moe, asked)


@pytest.mark.parametrize(("slots", "held"), [({}, room.ADAPTER_SLOTS), ({"max_loras": 3}, 3)])
def test_vllm_has_room_for_a_few_versions_of_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: dict[str, Any], held: int
) -> None:
    """Of rank 4, each takes as much as one of rank 8."""
    adapted = stage_model(adapted_model(rank=4), tmp_path).layout
    items = sum(tensor.nbytes // 2 for tensor in adapted.tensors if not tensor.frozen)
    asked, model = EngineOptions(places=64, arguments=slots), shape_of_layout(adapted)
    sample = 2 * sample_bytes(model, room.sample_tokens(model, asked), "float32")
    least = weights_bytes(model, "float32", "none") + held * 2 * items * 4 + room.FEW * sample
    here = Device(where="this machine", free_bytes=least, share=0.5, max_places=CPU_PLACES, dtype="float32")
    monkeypatch.setattr(room, "measured", lambda *_: here)
    assert reckon("vllm", adapted, asked).places == room.FEW
    assert reckon("transformers", adapted, asked).places > room.FEW
    # What vLLM refuses beside an adapter is not advised.
    less = dataclasses.replace(here, free_bytes=least - sample, lighter="--precision int4")
    monkeypatch.setattr(room, "measured", lambda *_: less)
    with pytest.raises(UserError, match="too little memory") as caught:
        reckon("vllm", adapted, asked)
    assert "int4" not in str(caught.value)


@pytest.mark.parametrize(("has_units", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_that_multiplies_bf16_is_reckoned_to_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_units: bool, dtype: str
) -> None:
    """It was reckoned with float32 before the weights were fetched, so a machine with half of that was sent away."""
    monkeypatch.setattr(device, "is_cpu_fast_in_half", lambda *_: has_units)
    model = stage_model(tiny_model(0), tmp_path).layout
    assert reckon("transformers", model, EngineOptions(device="cpu")).dtype == dtype
