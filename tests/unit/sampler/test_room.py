"""Whether a model and a few samples fit, reckoned from its layout: against real models, and for machines there are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from swarm.broadcast.version.manifest import Layout, ModelFile
from swarm.errors import UserError
from swarm.learner.memory import shape_of
from swarm.learner.tiny import tiny_model
from swarm.sampler import room
from swarm.sampler.engine import EngineOptions
from swarm.sampler.room import CPU_PLACES, Device, Model, model_of, places, reckon, sample_bytes, weights_bytes
from swarm.sampler.transformers import TransformersEngine
from swarm.types import Rounding
from tests.builders import layout
from tests.unit.models import adapted_model, moe_model, stage, stage_model

GIB = 1 << 30
QWEN3_600M = Model(
    matrices=440_401_920, others=155_648_000, layers=28, keys=1024, vocab_size=151_936, context_tokens=40_960
)
QWEN3_8B = Model(
    matrices=6_945_767_424, others=1_244_967_936, layers=36, keys=1024, vocab_size=151_936, context_tokens=40_960
)


def machine(free_gib: float, **changes: Any) -> Device:
    given: dict[str, Any] = {"where": "this machine", "share": 0.5, "most_places": CPU_PLACES, "dtype": "bfloat16"}
    return Device(free_bytes=int(free_gib * GIB), **{**given, **changes})


def gpu(free_gib: float) -> Device:
    return machine(free_gib, where="the GPU", share=1.0, most_places=512, precisions=("fp8", "int8", "int4"))


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
    found, shape = model_of(stage_model(model, tmp_path).layout), shape_of(model)
    assert found.matrices + found.others == shape.parameters
    assert (found.layers, found.keys, found.vocab_size) == (shape.layers, shape.keys, shape.vocab_size)
    assert found.context_tokens == (getattr(model.config, "max_position_embeddings", None) or 0)
    # Norms and biases are all that stays of a layer.
    assert 0.9 < found.matrices / (shape.parameters - shape.other_parameters) <= 1.0


@pytest.mark.parametrize(
    "config", [None, b"{", b"[1]", b'{"text_config": 3}', b'{"hidden_size": -1, "vocab_size": "x"}']
)
def test_where_a_configuration_says_nothing_it_is_guessed_on_the_high_side(config: bytes | None) -> None:
    tensors = layout(("embed.weight", "BF16", (50, 64)), ("layers.0.w.weight", "BF16", (64, 8))).tensors
    files = () if config is None else (ModelFile(name="config.json", content=config),)
    found = model_of(Layout(tensors=tensors, files=files))
    assert found == Model(matrices=512, others=3200, layers=1, keys=64, vocab_size=50, context_tokens=0)


def test_of_a_model_with_eyes_the_text_counts() -> None:
    config = json.dumps({"text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}})
    tensors = layout(("embed.weight", "BF16", (50, 64))).tensors
    assert model_of(Layout(tensors=tensors, files=(ModelFile(name="config.json", content=config.encode()),))).keys == 16


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


@pytest.mark.parametrize(
    ("device", "options", "changes"),
    [
        (gpu(9.0), {}, "--precision int4"),
        (gpu(7.5), {}, "--precision int4 --batch-samples 2"),
        (gpu(12.5), {}, "--precision fp8, or --precision int8, or --precision int4"),
        (gpu(16.4), {}, "--precision fp8, or --precision int8, or --precision int4, or --batch-samples 2, or "
         "--max-model-len 2048"),
        (gpu(6.2), {}, "--precision int4 --max-model-len 256"),
        (gpu(6.2), {"precision": "int8"}, "--precision int4 --max-model-len 256"),
        (machine(9.0, precisions=("int4",), with_vllm=True), {}, "--engine vllm --precision int4 --batch-samples 1"),
        (machine(24.0, dtype="float32"), {}, "--dtype bfloat16"),
        (machine(4.0), {}, ""),
    ],
)  # fmt: skip
def test_too_little_memory_is_said_with_what_would_fit(device: Device, options: dict[str, Any], changes: str) -> None:
    with pytest.raises(UserError, match="too little memory") as refused:
        places(QWEN3_8B, device, EngineOptions(**options))
    line = str(refused.value)
    assert line.partition("change: ")[2] == ", or ".join(
        filter(None, [changes, "end what else runs there", "help with --role relay"])
    )
    assert "\n" not in line


def test_what_is_named_as_enough_is_enough() -> None:
    for free_gib in range(5, 40):
        for options in (EngineOptions(), EngineOptions(places=1), EngineOptions(max_model_len=512, precision="fp8")):
            device = gpu(free_gib)
            try:
                places(QWEN3_8B, device, options)
            except UserError as refused:
                for change in str(refused).partition("change: ")[2].split(", or ")[:-2]:
                    words = change.split()
                    asked: dict[str, Any] = {"places": options.places, "max_model_len": options.max_model_len}
                    asked["precision"] = options.precision
                    for flag, value in zip(words[::2], words[1::2], strict=True):
                        name = {"--batch-samples": "places", "--max-model-len": "max_model_len"}.get(flag, "precision")
                        asked[name] = value if name == "precision" else int(value)
                    assert places(QWEN3_8B, device, EngineOptions(**asked)) >= 1


def test_an_engine_is_not_begun_where_its_model_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = stage(tmp_path)
    weights = sum(parameter.nbytes for parameter in staged.model.parameters())
    monkeypatch.setattr(room, "free_host_bytes", lambda: weights)
    with pytest.raises(
        UserError, match=r"this machine has 0\.\d MB free, and the swarm's model takes 0\.\d MB in float32"
    ):
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
    sample = 2 * sample_bytes(model_of(moe), room.sample_tokens(model_of(moe), asked), "float32")
    least = weights_bytes(model_of(moe), "float32", "none") + room.FEW * sample
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
    asked, model = EngineOptions(places=64, arguments=slots), model_of(adapted)
    sample = 2 * sample_bytes(model, room.sample_tokens(model, asked), "float32")
    least = weights_bytes(model, "float32", "none") + held * 2 * items * 4 + room.FEW * sample
    here = Device(where="this machine", free_bytes=least, share=0.5, most_places=CPU_PLACES, dtype="float32")
    monkeypatch.setattr(room, "measured", lambda *_: here)
    assert reckon("vllm", adapted, asked).places == room.FEW
    assert reckon("transformers", adapted, asked).places > room.FEW
    # What vLLM refuses beside an adapter is not advised.
    less = dataclasses.replace(here, free_bytes=least - sample, precisions=("fp8", "int8"))
    monkeypatch.setattr(room, "measured", lambda *_: less)
    with pytest.raises(UserError, match="too little memory") as caught:
        reckon("vllm", adapted, asked)
    assert "--precision" not in str(caught.value)
