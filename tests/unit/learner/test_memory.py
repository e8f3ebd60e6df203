"""The memory preflight: its arithmetic, what it chooses, and the line it refuses with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from swarm.errors import UserError
from swarm.learner import ranks as ranks_module
from swarm.learner import trainer as trainer_module
from swarm.learner.adapter import attach
from swarm.learner.memory import (
    GIB,
    SNAPSHOT_BYTES,
    WHOLE_GRADIENT_BYTES,
    Setting,
    Shape,
    check_weights,
    choose,
    read_free_bytes,
    read_shape,
    shape_of,
    step_bytes,
)
from swarm.learner.messages import AdapterRules, ComputeRules
from swarm.learner.models import tiny_model, tiny_tokenizer
from swarm.learner.policy import CHUNK_BYTES, Policy, arrange
from swarm.learner.process import prepare_command
from swarm.learner.trainer import Trainer
from swarm.process import NoParent
from swarm.settings import LeadConfig
from tests.unit.rows import CPU, small_model
from tests.unit.trainers import trainer_in

# Qwen3-4B.
FOUR_B = Shape(
    parameters=4_022_468_096,
    trained=4_022_468_096,
    layer_parameters=100_930_816,
    other_parameters=388_958_720,
    layers=36,
    hidden=2560,
    feed_forward=9728,
    queries=4096,
    keys=1024,
    vocab_size=151_936,
)
ON_GPU = Setting(
    tokens=16_384,
    activation_checkpointing=True,
    half=True,
    in_chunks=True,
    has_dense_mask=False,
    ranks=1,
    has_reference=False,
    on_host=False,
)


def total(setting: Setting) -> int:
    return sum(step_bytes(FOUR_B, setting).values())


def test_each_part_is_counted_for_what_it_is() -> None:
    parts = step_bytes(FOUR_B, ON_GPU)
    assert parts["gradients and AdamW"] == 12 * FOUR_B.parameters
    assert parts["weights gathered or in bf16"] == 2 * FOUR_B.parameters
    assert parts["logits"] == 2 * CHUNK_BYTES + 4 * 151_936 * 2560
    assert parts["activations"] > 16_384 * 36 * 2560 * 2
    assert set(parts) == {"gradients and AdamW", "weights gathered or in bf16", "logits", "activations"}


def test_what_else_is_there_is_added() -> None:
    assert total(replace(ON_GPU, has_reference=True)) - total(ON_GPU) == 4 * FOUR_B.parameters
    assert total(replace(ON_GPU, on_host=True)) - total(ON_GPU) == SNAPSHOT_BYTES * FOUR_B.parameters
    assert total(replace(ON_GPU, has_dense_mask=True)) - total(ON_GPU) == 5 * 16_384**2
    whole = step_bytes(FOUR_B, replace(ON_GPU, in_chunks=False))["logits"]
    assert whole == 3 * 4 * 16_384 * 151_936 + 4 * 151_936 * 2560
    without = step_bytes(FOUR_B, replace(ON_GPU, activation_checkpointing=False))["activations"]
    assert without > 10 * step_bytes(FOUR_B, ON_GPU)["activations"]
    eight = step_bytes(FOUR_B, replace(ON_GPU, ranks=8))
    assert eight["gradients and AdamW"] == 12 * FOUR_B.parameters // 8
    assert eight["activations"] == step_bytes(FOUR_B, ON_GPU)["activations"]


@pytest.mark.parametrize(
    ("free_gib", "tokens", "checkpointing"),
    [(300, 16_384, False), (110, 8192, False), (78, 16_384, True), (65, 8192, True), (61, 4096, True)],
)
def test_the_fastest_way_that_fits_is_chosen(free_gib: int, tokens: int, checkpointing: bool) -> None:
    found = choose(FOUR_B, ON_GPU, ComputeRules(), free_gib * GIB, longest=0)
    assert (found.tokens_per_micro_batch, found.activation_checkpointing) == (tokens, checkpointing)


def test_what_the_user_has_set_stays() -> None:
    wanted = ComputeRules(tokens_per_micro_batch=1000, activation_checkpointing=True)
    assert choose(FOUR_B, ON_GPU, wanted, 300 * GIB, longest=0) == wanted
    with pytest.raises(UserError, match=r"fewer --tokens-per-micro-batch"):
        choose(FOUR_B, ON_GPU, ComputeRules(tokens_per_micro_batch=1 << 20), 100 * GIB, longest=0)
    with pytest.raises(UserError, match="activation_checkpointing"):
        choose(FOUR_B, ON_GPU, ComputeRules(activation_checkpointing=False), 80 * GIB, longest=0)


def test_a_row_longer_than_the_budget_is_reckoned_with() -> None:
    found = choose(FOUR_B, ON_GPU, ComputeRules(), 110 * GIB, longest=0)
    longer = choose(FOUR_B, ON_GPU, ComputeRules(), 110 * GIB, longest=32_768)
    assert (found.activation_checkpointing, longer.activation_checkpointing) == (False, True)
    with pytest.raises(UserError, match=r"a step of one row of 131,072 tokens needs .*fewer --max-new-tokens or max_p"):
        choose(FOUR_B, ON_GPU, ComputeRules(), 65 * GIB, longest=131_072)


def test_too_little_is_one_line_that_says_what_does_not_fit() -> None:
    with pytest.raises(UserError) as caught:
        choose(FOUR_B, ON_GPU, ComputeRules(), 40 * GIB, longest=0)
    line = str(caught.value)
    assert "\n" not in line
    assert "40.0 GiB are free" in line
    assert "gradients and AdamW 45.0 GiB" in line
    assert "--trainer-ranks" in line
    assert "a smaller model" in line


@pytest.mark.parametrize(
    ("setting", "rules", "free_gib", "longest", "changes"),
    [
        # Of one device of 24 GB nothing but more of them is enough, however few the tokens are.
        (ON_GPU, ComputeRules(), 8, 8192, "--trainer-ranks 5 on as many such devices, or a smaller model"),
        (
            replace(ON_GPU, has_reference=True),
            ComputeRules(),
            64,
            0,
            "kl_weight = 0, or --trainer-ranks 2 on as many such devices, or a smaller model",
        ),
        # The ranks of a CPU share its memory.
        (replace(ON_GPU, on_host=True, half=False), ComputeRules(), 64, 0, "a smaller model"),
    ],
)
def test_only_what_would_be_enough_is_said(
    setting: Setting, rules: ComputeRules, free_gib: int, longest: int, changes: str
) -> None:
    with pytest.raises(UserError) as caught:
        choose(FOUR_B, setting, rules, free_gib * GIB, longest=longest)
    assert str(caught.value).endswith(f"; change: {changes}")


def test_the_ranks_that_are_said_to_be_enough_are() -> None:
    whole = 23 * GIB
    for ranks, enough in ((4, False), (5, True)):
        free = whole - 4 * FOUR_B.parameters // ranks
        if enough:
            choose(FOUR_B, replace(ON_GPU, ranks=ranks), ComputeRules(), free, longest=1024)
        else:
            with pytest.raises(UserError):
                choose(FOUR_B, replace(ON_GPU, ranks=ranks), ComputeRules(), free, longest=1024)


def test_ranks_need_room_for_what_each_of_them_has_whole() -> None:
    small = replace(FOUR_B, parameters=WHOLE_GRADIENT_BYTES // 4)
    assert step_bytes(small, replace(ON_GPU, ranks=2))["whole gradient of each rank"] == WHOLE_GRADIENT_BYTES
    assert "whole gradient of each rank" not in step_bytes(small, ON_GPU)
    larger = replace(small, parameters=small.parameters + 1)
    assert "whole gradient of each rank" not in step_bytes(larger, replace(ON_GPU, ranks=2))
    # An output layer that is not tied is gathered beside the embedding.
    tied = step_bytes(FOUR_B, replace(ON_GPU, ranks=8))["weights gathered or in bf16"]
    more = replace(FOUR_B, other_parameters=2 * FOUR_B.other_parameters)
    assert step_bytes(more, replace(ON_GPU, ranks=8))["weights gathered or in bf16"] - tied == 8 * 388_958_720


def test_a_model_whose_weights_cannot_fit_is_refused_before_it_is_loaded() -> None:
    one = replace(FOUR_B, parameters=10**9, trained=10**9)
    enough: dict[str, Any] = {"half": True, "device": "cuda:0"}
    check_weights(one, ranks=1, free_bytes=16 * 10**9, host_bytes=14 * 10**9, **enough)
    with pytest.raises(UserError, match=r"--trainer-ranks 5"):
        check_weights(FOUR_B, ranks=1, free_bytes=23 * GIB, host_bytes=10**12, **enough)
    with pytest.raises(UserError, match=r"change: --adapter 8, which takes 7.7 GiB of it, or a smaller model"):
        check_weights(FOUR_B, ranks=1, free_bytes=23 * GIB, host_bytes=10**12, **enough)
    with pytest.raises(UserError, match=r"change: a smaller model"):
        check_weights(FOUR_B, ranks=1, free_bytes=7 * GIB, host_bytes=10**12, **enough)
    check_weights(FOUR_B, ranks=5, free_bytes=23 * GIB, host_bytes=10**12, **enough)
    with pytest.raises(UserError, match="on the host"):
        check_weights(one, ranks=1, free_bytes=10**12, host_bytes=10**9, **enough)


@pytest.mark.parametrize("name", ["qwen3", "llama", "window", "capped", "scaled", "dropout", "alibi"])
def test_the_shape_of_every_architecture_is_read(name: str) -> None:
    model = small_model(name)
    shape = shape_of(model)
    assert shape.layers == 2
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert 0 < 2 * shape.layer_parameters < shape.parameters
    assert shape.other_parameters >= 14 * shape.hidden
    assert (shape.vocab_size, shape.hidden) == (14, model.config.hidden_size)


def test_a_model_is_counted_from_its_configuration_alone(tmp_path: Path) -> None:
    model = tiny_model(0)
    model.config.save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)) == shape_of(model)
    attach(model, rules := AdapterRules(rank=4, alpha=8.0), name="tiny", seed=0)
    assert read_shape(str(tmp_path), rules) == shape_of(model)
    assert read_shape(str(tmp_path / "nothing")) is None


def test_free_memory_is_read_and_shared_among_ranks() -> None:
    free = read_free_bytes(CPU, ranks=1)
    assert 1 << 20 < free < 1 << 50
    assert read_free_bytes(CPU, ranks=4) < free / 2


@pytest.mark.parametrize("half", [False, True])
def test_activations_are_what_autograd_keeps(half: bool) -> None:
    """Of a layer of the Qwen kind, by the bytes of the tensors that it saves, without the copies of weights."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    model = Qwen3ForCausalLM(config).train()  # type: ignore[no-untyped-call]
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    matrices = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1]) if p.dim() == 2}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.shape not in matrices:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    Policy(model, ComputeRules(), temperature=1.0)  # Which sets up what norms give
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half_precision(half):
        alive = model.model(input_ids=torch.zeros((8, 64), dtype=torch.long), use_cache=False)
    setting = replace(ON_GPU, tokens=512, activation_checkpointing=False, half=half)
    estimated = step_bytes(shape_of(model), setting)["activations"]
    assert alive.last_hidden_state.shape == (8, 64, 128)
    assert estimated == pytest.approx(sum(kept.values()), rel=0.12)


def half_precision(on: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def test_a_trainer_says_how_it_computes_and_refuses_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "SMALL_MODEL_PARAMETERS", 1000)
    tiny_model(0).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    trainer = trainer_in(tmp_path, model=str(tmp_path / "tiny"))
    assert trainer.prepared().notes == ("a learner step takes up to 16,384 tokens at a time, padded, in float32",)
    monkeypatch.setattr(trainer_module, "read_free_bytes", lambda device, ranks: 2_000_000)
    with pytest.raises(UserError, match="a step of"):
        trainer_in(tmp_path, model=str(tmp_path / "tiny"))
    monkeypatch.setattr(trainer_module, "read_free_bytes", lambda device, ranks: 1_000_000)
    monkeypatch.setattr(ranks_module, "load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match="too little memory on cpu"):
        trainer_in(tmp_path, model=str(tmp_path / "tiny"))


@pytest.mark.parametrize(("prompt", "longest"), [(7, 10), (None, 64)])
def test_a_row_is_a_prompt_and_a_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: int | None, longest: int
) -> None:
    """And no longer than the model's context."""
    monkeypatch.setattr(trainer_module, "SMALL_MODEL_PARAMETERS", 1000)
    found: list[int] = []

    def fitted(policy: object, rules: ComputeRules, *_: object, longest: int, **__: object) -> ComputeRules:
        found.append(longest)
        return msgspec.structs.replace(rules, tokens_per_micro_batch=64)

    monkeypatch.setattr(trainer_module, "fit", fitted)
    config = LeadConfig(device="cpu", max_prompt_tokens=prompt)
    files = {"files_dir": tmp_path / "model", "staging": tmp_path / "staging.bin"}
    Trainer(prepare_command(config, longest_completion=3, **files), NoParent())
    assert found == [longest]


def test_a_model_without_activation_checkpointing_is_not_given_it() -> None:
    model = small_model("qwen3")
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="has no activation checkpointing"):
        arrange(model, ComputeRules(activation_checkpointing=True))
    with pytest.raises(UserError, match="too little memory"):
        choose(FOUR_B, ON_GPU, ComputeRules(), 78 * GIB, longest=0, may_checkpoint=False)
