"""The memory preflight: its arithmetic, what it chooses, and the line it refuses with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import learner as reckoned
from swarm.errors import UserError
from swarm.learner import ranks as ranks_module
from swarm.learner import trainer as trainer_module
from swarm.learner.adapter import attach
from swarm.learner.memory import (
    CHANGES,
    FREE_SHARE,
    STREAMED_BYTES,
    WHOLE_GRADIENT_BYTES,
    Setting,
    check_weights,
    choose,
    fits,
    kept_on_host,
    read_free_bytes,
    read_shape,
    shape_of,
    step_bytes,
)
from swarm.learner.messages import TrainerConfig
from swarm.learner.optimizer import adamw
from swarm.learner.policy import CHUNK_BYTES, Policy, arrange
from swarm.learner.process import trainer_config
from swarm.learner.tiny import tiny_model
from swarm.learner.trainer import Trainer
from swarm.models.device import has_full_attention, stated
from swarm.models.memory import GIB, weights_bytes
from swarm.process import NoParent
from swarm.settings import LeadConfig
from swarm.types import OptimizerStates
from tests.unit.models import model_directory
from tests.unit.rows import CPU, small_model
from tests.unit.trainers import trainer_in

# Qwen3-4B.
FOUR_B, ON_GPU = reckoned.shape("4B"), replace(reckoned.ON_GPU, tokens=16_384)
CUDA = torch.device("cuda:0")


def rules_of(states: OptimizerStates) -> TrainerConfig:
    return TrainerConfig(precision="bfloat16", optimizer_states=states)


PARAMETERS = FOUR_B.parameters
HEAD_GRADIENT = 8 * 151_936 * 2560


@pytest.mark.parametrize(
    ("change", "part", "nbytes"),
    [
        # With checkpointing the layer that is computed alone, with its gradient, and what is in no layer.
        ({}, "weights gathered or in bf16", 2 * (2 * FOUR_B.layer_parameters + FOUR_B.other_parameters)),
        ({}, "logits", 2.5 * CHUNK_BYTES + HEAD_GRADIENT),
        ({"in_chunks": False}, "logits", 3 * 4 * 16_384 * 151_936 + HEAD_GRADIENT),
        ({"has_reference": True}, "weights of the reference", 4 * PARAMETERS),
        ({"on_host": True}, "a checkpoint", 2 * PARAMETERS),
        ({"has_dense_mask": True}, "the mask of packed rows", 5 * 16_384**2),
        ({"states": "host"}, "gradients and AdamW", 4 * PARAMETERS + STREAMED_BYTES),
        ({"ranks": 8}, "gradients and AdamW", 12 * PARAMETERS // 8),
    ],
)
def test_each_part_is_counted_for_what_it_is(change: dict[str, Any], part: str, nbytes: float) -> None:
    assert step_bytes(FOUR_B, replace(ON_GPU, **change))[part] == pytest.approx(nbytes, rel=1e-9)


def test_nothing_else_is_counted_and_checkpointing_leaves_few_activations() -> None:
    parts = step_bytes(FOUR_B, ON_GPU)
    assert set(parts) == {"gradients and AdamW", "weights gathered or in bf16", "logits", "activations"}
    without = step_bytes(FOUR_B, replace(ON_GPU, activation_checkpointing=False))["activations"]
    assert without > 10 * parts["activations"]
    assert step_bytes(FOUR_B, replace(ON_GPU, ranks=8))["activations"] == parts["activations"]


def test_moments_whose_rows_are_no_whole_blocks_stay_in_float32() -> None:
    for shape in (replace(FOUR_B, hidden=896), reckoned.shape("4B", 32)):
        some, others = (
            step_bytes(shape, one)["gradients and AdamW"] for one in (replace(ON_GPU, states="8bit"), ON_GPU)
        )
        assert some == others == 12 * shape.trained


@pytest.mark.parametrize(
    ("free_gib", "tokens", "checkpointing"),
    [(300, 16_384, False), (110, 4096, False), (78, 16_384, True), (59, 8192, True), (55, 2048, True)],
)
def test_the_fastest_way_that_fits_is_chosen(free_gib: int, tokens: int, checkpointing: bool) -> None:
    found = choose(FOUR_B, ON_GPU, TrainerConfig(), free_gib * GIB, longest=0)
    assert (found.tokens_per_micro_batch, found.activation_checkpointing) == (tokens, checkpointing)


def test_what_the_user_has_set_stays_and_a_row_longer_than_the_budget_is_reckoned_with() -> None:
    wanted = TrainerConfig.model_construct(tokens_per_micro_batch=1000, activation_checkpointing=True)
    assert choose(FOUR_B, ON_GPU, wanted, 300 * GIB, longest=0) == wanted
    assert choose(FOUR_B, ON_GPU, TrainerConfig(), 110 * GIB, longest=32_768).activation_checkpointing


@pytest.mark.parametrize(
    ("rules", "free_gib", "longest", "said"),
    [
        (TrainerConfig.model_construct(tokens_per_micro_batch=1 << 20), 100, 0, "a step of 1,048,576 tokens at a time"),
        (TrainerConfig(activation_checkpointing=False), 80, 0, "too little memory"),
        (TrainerConfig(), 65, 131_072, "a step of one row of 131,072 tokens needs "),
        (TrainerConfig(), 40, 0, r"40\.0 GiB are free.*gradients and AdamW 45\.0 GiB"),
    ],
)
def test_too_little_is_one_line_that_says_what_does_not_fit(
    rules: TrainerConfig, free_gib: int, longest: int, said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        choose(FOUR_B, ON_GPU, rules, free_gib * GIB, longest=longest)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"; change: {CHANGES}")


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


@pytest.mark.parametrize(
    ("states", "free_gib", "host_gib", "fault"),
    [
        ("float32", 40, 1000, r"on cuda:0: to train 4,022,468,096 .* takes 59.9 GiB .*, and 40.0 GiB are free"),
        ("float32", 70, 40, "on the host: .* take 52.4 GiB, and 40.0 GiB are free"),
        ("8bit", 70, 20, "on the host: .* take 30.1 GiB, and 20.0 GiB are free"),
        ("host", 70, 80, "on the host: moments that are kept there, .* take 82.4 GiB, and 80.0 GiB are free"),
    ],
)
def test_where_moments_are_is_known_before_the_model_is_loaded(
    states: OptimizerStates, free_gib: int, host_gib: int, fault: str
) -> None:
    with pytest.raises(UserError, match=fault):
        check_weights(FOUR_B, rules_of(states), CUDA, (free_gib * GIB, host_gib * GIB), 1)


def test_ranks_share_the_weights_and_a_cpu_keeps_nothing_twice() -> None:
    check_weights(FOUR_B, rules_of("float32"), CUDA, (23 * GIB, 10**12), 5)
    assert kept_on_host(FOUR_B, replace(ON_GPU, on_host=True)) == 0


CARD_80, CARD_24 = 78 * GIB, 23 * GIB  # What a card of 80 GB, and one of 24, has free at first


@pytest.mark.parametrize(
    ("model", "adapter", "card", "setting"),
    [
        ("4B", None, CARD_80, replace(ON_GPU, tokens=8192)),
        ("8B", None, CARD_80, replace(ON_GPU, tokens=8192, ranks=2, states="8bit")),
        ("8B", None, CARD_80, replace(ON_GPU, tokens=8192, states="host")),
        ("8B", 32, CARD_24, replace(ON_GPU, tokens=8192)),
        ("32B", 32, CARD_80, replace(ON_GPU, tokens=8192)),
    ],
)
def test_the_cards_that_people_have_are_enough(model: str, adapter: int | None, card: int, setting: Setting) -> None:
    """By the arithmetic alone; the docs say the same."""
    shape = reckoned.shape(model, adapter)
    loaded = reckoned.weight_bytes(shape, setting.ranks)
    check_weights(shape, rules_of(setting.states), CUDA, (card, 10**13), setting.ranks)
    assert fits(shape, setting, card - loaded)


def test_the_base_of_an_adapter_takes_less_than_what_is_trained_and_less_again_in_four_bits() -> None:
    shape, rules = reckoned.shape("14B", 32), rules_of("float32")
    # Autocast copies what is not bf16 already: 2 bytes of each that is trained.
    parts = step_bytes(shape, ON_GPU)
    assert parts["weights gathered or in bf16"] == 2 * shape.trained
    assert parts["gradients and AdamW"] == 12 * shape.trained
    just = 16 * shape.trained + 2 * (shape.parameters - shape.trained)
    check_weights(shape, rules, CUDA, (just, 10**13), 1)
    with pytest.raises(
        UserError, match=rf"to train {shape.trained:,} parameters and hold 14,[0-9,]* frozen ones takes"
    ):
        check_weights(shape, rules, CUDA, (just - 1, 10**13), 1)
    packed = replace(shape, rounded=shape.parameters - shape.trained - shape.other_parameters)
    check_weights(packed, rules, CUDA, (CARD_24, 10**13), 1)
    assert fits(packed, replace(ON_GPU, tokens=4096), CARD_24 - weights_bytes(packed, "bfloat16", "nf4"))


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
    attach(model, 4, 8.0, name="tiny", seed=0)
    assert read_shape(str(tmp_path), 4) == shape_of(model)
    assert read_shape(str(tmp_path / "nothing")) is None


def test_free_memory_is_read_and_shared_among_ranks() -> None:
    assert 0 < read_free_bytes(CPU, ranks=4) < read_free_bytes(CPU, ranks=1) / 2


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

    Policy(model, TrainerConfig(), temperature=1.0)  # Which sets up what norms give
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half_precision(half):
        alive = model.model(input_ids=torch.zeros((8, 64), dtype=torch.long), use_cache=False)
    setting = replace(ON_GPU, tokens=512, activation_checkpointing=False, half=half)
    estimated = step_bytes(shape_of(model), setting)["activations"]
    assert alive.last_hidden_state.shape == (8, 64, 128)
    assert estimated == pytest.approx(sum(kept.values()), rel=0.12)


@pytest.mark.parametrize("states", ["float32", "8bit", "host"])
def test_what_is_trained_takes_what_is_reckoned(states: OptimizerStates) -> None:
    """Weights, gradients and moments, as they are after a step."""
    config = tiny_model(0).config
    config.update({"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024})
    model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    optimizer = adamw(model, 1e-3, states=states)
    model(input_ids=torch.zeros((1, 4), dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    held = [tensor for p in model.parameters() for tensor in (p, p.grad, *optimizer.state[p].values())]
    shape = shape_of(model)
    setting = replace(ON_GPU, states=states, on_host=True)
    reckoned_bytes = 4 * shape.parameters + step_bytes(shape, setting)["gradients and AdamW"]
    assert sum(tensor.nbytes for tensor in held) == pytest.approx(reckoned_bytes, rel=0.01)


def half_precision(on: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def test_a_trainer_says_how_it_computes_and_refuses_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "SMALL_MODEL_PARAMETERS", 1000)
    model = model_directory(tmp_path / "tiny")
    trainer = trainer_in(tmp_path, model=model)
    assert trainer.prepared().notes == (
        "a learner step takes up to 16,384 tokens at a time, padded, each prompt once, in float32",
    )
    # What a sampler next to it may take: less than the free share of what was free, by what a step needs.
    monkeypatch.setattr(trainer_module, "read_free_bytes", lambda device, ranks: 100 * GIB)
    left = [trainer_in(tmp_path, model=model, tokens_per_micro_batch=n).prepared().left_bytes for n in (4096, 8192)]
    assert 0 < left[1] < left[0] < FREE_SHARE * 100 * GIB
    trainer = trainer_in(tmp_path, model=model, activation_checkpointing=True, optimizer_states="host")
    (line,) = trainer.prepared().notes
    assert line.endswith("in float32, with activation checkpointing, and AdamW's moments on the host")
    assert trainer._model.is_gradient_checkpointing
    monkeypatch.setattr(trainer_module, "read_free_bytes", lambda device, ranks: 2_000_000)
    with pytest.raises(UserError, match="a step of"):
        trainer_in(tmp_path, model=model)
    monkeypatch.setattr(trainer_module, "read_free_bytes", lambda device, ranks: 1_000_000)
    monkeypatch.setattr(ranks_module, "load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match="too little memory on cpu"):
        trainer_in(tmp_path, model=model)


@pytest.mark.parametrize(("prompt", "longest"), [(7, 10), (None, 128)])
def test_a_row_is_a_prompt_and_a_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: int | None, longest: int
) -> None:
    """And no longer than the model's context."""
    monkeypatch.setattr(trainer_module, "SMALL_MODEL_PARAMETERS", 1000)
    found: list[int] = []

    def fitted(
        policy: object, rules: TrainerConfig, *_: object, longest: int, **__: object
    ) -> tuple[TrainerConfig, int]:
        found.append(longest)
        return rules.model_copy(update={"tokens_per_micro_batch": 128}), 0

    monkeypatch.setattr(trainer_module, "fit", fitted)
    config = LeadConfig(device="cpu", max_prompt_tokens=prompt)
    Trainer(trainer_config(config, tmp_path, 3), NoParent())
    assert found == [longest]


def test_a_model_without_activation_checkpointing_is_not_given_it() -> None:
    model = small_model("qwen3")
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="has no activation checkpointing"):
        arrange(model, TrainerConfig(activation_checkpointing=True))
    with pytest.raises(UserError, match="too little memory"):
        choose(FOUR_B, ON_GPU, TrainerConfig(), 78 * GIB, longest=0, may_checkpoint=False)


FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.slow
def test_every_family_that_can_be_built_tells_its_shape() -> None:
    """Also those whose layers differ, and that have no heads, no limit of positions or another name for either."""
    told, build = 0, cast(Any, AutoModelForCausalLM)
    for name in FAMILIES:
        try:
            config: Any = AutoConfig.for_model(name)
            config.get_text_config().num_hidden_layers = 2
            with torch.device("meta"):
                model = build.from_config(config)
        except Exception:  # noqa: BLE001 - what cannot be built by its defaults, or without another package
            continue
        shape, text = shape_of(model), model.config.get_text_config()
        assert min(shape.hidden, shape.queries, shape.keys, shape.vocab_size, shape.layer_parameters) > 0, name
        assert isinstance(has_full_attention(model), bool)
        assert isinstance(stated(text, "max_position_embeddings", "max_seq_len") or 0, int), name
        told += 1
    assert told > 120


def test_of_layers_that_differ_the_largest_is_told() -> None:
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6)
    widths = {config.per_layer_config[layer].head_dim for layer in range(6)}
    assert len(widths) > 1
    assert stated(config, "head_dim") == max(widths)
    assert (stated(config, "no_such", "hidden_size"), stated(config, "no_such")) == (config.hidden_size, None)
