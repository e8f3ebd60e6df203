"""A base in 4 bits: the learner computes with what it publishes, and goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from swarm.broadcast.publishing import base_of_file
from swarm.broadcast.version.manifest import Layout
from swarm.errors import UserError
from swarm.learner.adapter import NF4_BLOCK, FourBit, as_published, hold_in, linear_layers, parameters_of
from swarm.learner.batch import micro_batches
from swarm.learner.checkpoint.export import export_model
from swarm.learner.checkpoint.files import ADAPTER_WEIGHTS
from swarm.learner.checkpoint.merge import merge_into
from swarm.learner.checkpoint.model_files import write_staging
from swarm.learner.memory import check_weights, read_shape, shape_of
from swarm.learner.messages import Train, TrainerConfig
from swarm.learner.tiny import tiny_model
from swarm.learner.trainer import Trainer
from swarm.models.memory import weights_bytes
from swarm.sampler.weights import mapped_tensors
from tests.unit.models import frozen, logprobs_of
from tests.unit.rows import CPU, row
from tests.unit.trainers import group, saved, trainer_in

pytest.importorskip("bitsandbytes", reason="bitsandbytes has no build for this system")

RULES: dict[str, Any] = {"adapter": 4, "base_precision": "nf4"}
STEP = Train(step=0, groups=(group([1.0, 0.0, 0.0, 0.0]),))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return trainer_in(tmp_path, **RULES, learning_rate=1e-2)


def published(staging: Path, layout: Layout) -> Any:
    """A plain model of transformers with the frozen weights of a staged version."""
    model = tiny_model(1)
    held = {spec.name: tensor.float() for spec, tensor in mapped_tensors(str(staging), layout) if spec.frozen}
    model.load_state_dict(held, strict=False)
    assert set(held) >= {name for name, _ in model.named_parameters()}
    return model.eval()


def test_what_is_published_is_what_four_bits_stand_for(trainer: Trainer, tmp_path: Path) -> None:
    layout, staging = trainer.prepared().layout, tmp_path / "other.bin"
    write_staging(trainer._tensors, staging)
    assert staging.read_bytes() == (tmp_path / "staging.bin").read_bytes()
    own, found = frozen(tiny_model(0)), published(staging, layout)
    for name in linear_layers(own):
        weight, held = (model.get_submodule(name).weight for model in (own, found))
        shares = (held.view(-1, NF4_BLOCK) / weight.view(-1, NF4_BLOCK).abs().amax(1, keepdim=True)).round(decimals=1)
        assert len(shares.unique()) <= 16
        assert 0 < (held - weight).abs().mean() < 0.1 * weight.abs().mean()
    assert torch.equal(found.model.embed_tokens.weight, own.model.embed_tokens.weight)


def test_learner_and_a_plain_model_with_the_published_weights_agree(trainer: Trainer, tmp_path: Path) -> None:
    """The same numbers, computed with twice: no mismatch that bf16 would not have. Their gradients agree too."""
    layout = trainer.prepared().layout
    plain = published(tmp_path / "staging.bin", layout)
    (part,) = micro_batches([row((1, 4, 13), (3, 4, 5))], TrainerConfig(), CPU)
    expected = logprobs_of(plain, (1, 4, 13), (3, 4, 5))
    assert trainer._policy.read(part).logprobs.tolist() == pytest.approx(expected, abs=1e-6)
    other = logprobs_of(frozen(tiny_model(0)), (1, 4, 13), (3, 4, 5))
    assert max(abs(one - two) for one, two in zip(expected, other, strict=True)) > 1e-3
    gradients = []
    for model in (trainer._model, plain):
        embedded = model.get_input_embeddings()(torch.tensor([[1, 4, 13, 3]])).detach().requires_grad_()
        model(inputs_embeds=embedded).logits.log_softmax(-1)[0, -1, 3].backward()
        gradients.append(embedded.grad)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


@pytest.mark.parametrize("compute", [{}, {"precision": "bfloat16", "activation_checkpointing": True}])
def test_a_step_trains_the_adapter_alone(compute: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, **RULES, learning_rate=1e-2, **compute)
    held = {name: p.detach().clone() for name, p in trainer._model.named_parameters()}
    done = trainer.step(STEP)
    assert done.metrics["optimizer_steps"] == 2
    assert done.metrics["grad_norm"] > 0
    changed = {n for n, p in trainer._model.named_parameters() if not torch.equal(p, held[n])}
    assert changed == {n for n, p in trainer._model.named_parameters() if p.requires_grad}
    assert sum(isinstance(module, FourBit) for module in trainer._model.modules()) == 14


def test_it_goes_on_with_the_same_base_and_with_no_other(trainer: Trainer, tmp_path: Path) -> None:
    layout, checkpoint = trainer.prepared().layout, tmp_path / "checkpoints/step-000001"
    assert layout.adapter is not None
    assert layout.adapter.base == base_of_file(tmp_path / "staging.bin", layout)
    trainer.step(STEP)
    saved(trainer, checkpoint, 1)
    again = trainer_in(tmp_path / "again", **RULES, resume=checkpoint, learning_rate=1e-2)
    assert again.prepared().layout == layout
    for one in (trainer, again):
        one.step(Train(step=1, groups=STEP.groups))
        one.stage()
    assert (tmp_path / "again/staging.bin").read_bytes() == (tmp_path / "staging.bin").read_bytes()
    with pytest.raises(UserError, match="trained with other frozen weights"):
        trainer_in(tmp_path / "other", adapter=4, resume=checkpoint)


def test_it_is_merged_into_the_base_that_it_was_trained_beside(trainer: Trainer, tmp_path: Path) -> None:
    layout = trainer.prepared().layout
    trainer.step(STEP)
    saved(trainer, tmp_path / "checkpoints/step-000001", 1)

    def merge(directory: Path) -> None:
        with safe_open(directory / ADAPTER_WEIGHTS, framework="pt") as file:
            assert file.metadata()["base_precision"] == "nf4"
        with pytest.raises(UserError, match="is not the model that this adapter was trained with"):
            merge_into(directory, model="tiny", seed=0, made_in=tmp_path)
        merge_into(directory, model="tiny", seed=0, made_in=tmp_path, precision="nf4")

    export_model(tmp_path, tmp_path / "whole", None, merge=merge)
    whole: Any = Qwen3ForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    (part,) = micro_batches([row((1, 4, 13), (3, 4))], TrainerConfig(), CPU)
    trained = trainer._policy.read(part).logprobs.tolist()
    # W + BA is rounded to bf16.
    assert logprobs_of(whole, (1, 4, 13), (3, 4)) == pytest.approx(trained, abs=1e-2)
    assert trained != pytest.approx(
        logprobs_of(published(tmp_path / "staging.bin", layout), (1, 4, 13), (3, 4)), abs=2e-2
    )


def test_transformers_quantises_to_the_same_numbers(tmp_path: Path) -> None:
    """As the card of an exported adapter says to load its base."""
    from transformers import BitsAndBytesConfig

    model: Any = frozen(tiny_model(0)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    hold_in(model, "nf4")
    configured: Any = BitsAndBytesConfig
    how = configured(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, device_map={"": "cpu"})
    for name in linear_layers(model):
        ours, theirs = (cast(Any, one.get_submodule(name).weight) for one in (model, other))
        assert torch.equal(as_published(ours), as_published(theirs))


def test_memory_is_reckoned_for_what_is_packed(tmp_path: Path) -> None:
    model = tiny_model(0)
    model.save_pretrained(tmp_path)
    packed = sum(model.get_submodule(name).weight.numel() for name in linear_layers(model))
    shape, plain = read_shape(str(tmp_path), 4, "nf4"), read_shape(str(tmp_path), 4)
    assert shape is not None
    assert plain is not None
    assert (shape.rounded, plain.rounded, shape.parameters) == (packed, 0, plain.parameters)
    left = shape.parameters - shape.trained - packed
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        assert weights_bytes(shape, dtype, "nf4") == int(4 * shape.trained + width * left + 0.5625 * packed)
        assert weights_bytes(plain, dtype, "nf4") == 4 * shape.trained + width * (left + packed)
    half_rules, cuda = TrainerConfig(precision="bfloat16"), torch.device("cuda:0")
    just = 12 * shape.trained + weights_bytes(shape, "bfloat16", "nf4")
    check_weights(shape, half_rules, cuda, (just, 1 << 40), 1)
    with pytest.raises(UserError, match="too little memory"):
        check_weights(plain, half_rules, cuda, (just, 1 << 40), 1)
    whole = shape_of(model)
    hold_in(model, "nf4")
    assert parameters_of(model) == whole.parameters
    assert (shape_of(model).rounded, shape_of(model).parameters) == (packed, whole.parameters)
    layer = model.get_submodule(linear_layers(model)[0])
    held = layer.weight.nbytes + layer.weight.quant_state.absmax.nbytes
    assert held == 0.5625 * layer.in_features * layer.out_features
