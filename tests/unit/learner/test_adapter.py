"""A trainer with an adapter, in this process: what it trains, what it stages, and what it leaves as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from swarm.broadcast.publishing import base_of_file
from swarm.broadcast.store.disk import copy_parts
from swarm.broadcast.version.manifest import frozen_regions, region_tensors, regions_of, trained_spans
from swarm.errors import UserError
from swarm.learner.adapter import WithoutAdapter, module_name, targets_of
from swarm.learner.batch import micro_batches
from swarm.learner.checkpoint.model_files import stored_weights
from swarm.learner.messages import Train, TrainerConfig
from swarm.learner.tiny import tiny_model
from swarm.learner.trainer import Trainer
from tests.unit.models import frozen, logprobs_of, published
from tests.unit.rows import CPU, row
from tests.unit.trainers import group, trainer_in

RANK = 4
STEP = Train(step=0, groups=(group([1.0, 0.0, 0.0, 0.0]),))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return trainer_in(tmp_path, adapter=RANK, learning_rate=1e-2)


def parameters(trainer: Trainer, *, trained: bool) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer._model.named_parameters() if p.requires_grad == trained}


def test_a_step_trains_the_adapter_alone_of_a_model_as_samplers_would_hold_it(trainer: Trainer) -> None:
    ids = torch.tensor([[1, 4, 13, 3, 5]])
    with torch.no_grad():
        assert torch.equal(trainer._model(input_ids=ids).logits, frozen(tiny_model(0))(input_ids=ids).logits)
    base, before = parameters(trainer, trained=False), parameters(trainer, trained=True)
    done = trainer.step(STEP)
    assert done.metrics["optimizer_steps"] == 2
    assert all(torch.equal(one, base[name]) for name, one in parameters(trainer, trained=False).items())
    after = parameters(trainer, trained=True)
    # 14 layers have one. A has no gradient while B is zeros, so it moves at the second optimiser step.
    assert len(after) == 2 * 14
    assert not any(torch.equal(after[name], before[name]) for name in after)
    assert set(trainer._learning.optimizer.state) == {p for p in trainer._model.parameters() if p.requires_grad}


def test_the_stream_holds_the_base_under_its_own_names_and_the_adapter_behind_it(trainer: Trainer) -> None:
    prepared = trainer.prepared()
    layout, own = prepared.layout, tiny_model(0)
    frozen = [tensor for tensor in layout.tensors if tensor.frozen]
    assert layout.tensors[: len(frozen)] == tuple(frozen)
    assert {name for t in frozen for name in (t.name, *t.aliases)} == set(own.state_dict())
    assert "model.layers.0.self_attn.q_proj" in layout.adapted
    assert len(layout.adapted) == 14
    (adapter,) = trained_spans(layout.tensors)
    assert adapter.start + adapter.nbytes == layout.total_bytes
    assert (adapter.nbytes, prepared.parameters) == (2 * prepared.trained, own.num_parameters() + prepared.trained)
    kinds = [{layout.tensors[index].frozen for index, _ in parts} for parts in region_tensors(layout)]
    assert kinds == [{kind} for kind in frozen_regions(layout)]
    assert len(kinds) == len(regions_of(layout))


def test_the_same_seed_makes_the_same_adapter_and_another_another_base(trainer: Trainer, tmp_path: Path) -> None:
    layout = trainer.prepared().layout
    assert trainer_in(tmp_path / "again", adapter=RANK).prepared().layout == layout
    assert (tmp_path / "again/staging.bin").read_bytes() == (tmp_path / "staging.bin").read_bytes()
    other = trainer_in(tmp_path / "other", adapter=RANK, seed=1).prepared().layout
    assert layout.adapter is not None
    assert other.adapter is not None
    assert layout.adapter.base == base_of_file(tmp_path / "staging.bin", layout) != other.adapter.base


def test_later_stagings_write_the_adapter_alone_and_a_new_file_gets_all(trainer: Trainer, tmp_path: Path) -> None:
    layout, staging = trainer.prepared().layout, tmp_path / "staging.bin"
    whole = staging.read_bytes()
    with staging.open("r+b") as file:
        file.write(b"seen")
    trainer.step(STEP)
    trainer.stage()
    (adapter,) = trained_spans(layout.tensors)
    content = staging.read_bytes()
    assert content[: adapter.start] == b"seen" + whole[4 : adapter.start]
    assert content[adapter.start :] != whole[adapter.start :]
    # The other file, as after a publication.
    staging.rename(tmp_path / "map.bin")
    trainer.stage()
    assert staging.read_bytes() == whole[: adapter.start] + content[adapter.start :]


def test_weights_that_were_kept_are_read_from_the_adapter_alone(trainer: Trainer, tmp_path: Path) -> None:
    """As the audit reads a version, from a file with a hole in place of the base."""
    layout = trainer.prepared().layout
    trainer.step(STEP)
    trainer.stage()
    copy_parts(tmp_path / "staging.bin", tmp_path / "held.bin", trained_spans(layout.tensors))
    expected = logprobs_of(published(trainer._model), (1, 4, 13), (3, 4))
    trainer.step(Train(step=1, groups=STEP.groups))
    weights = stored_weights(trainer._tensors, tmp_path / "held.bin")
    assert set(weights) == {f"model.{module_name(t.name)}" for t in layout.tensors if not t.frozen}
    with torch.no_grad():
        named = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        given = {"input_ids": torch.tensor([[1, 4, 13, 3, 4]]), "use_cache": False}
        table = torch.func.functional_call(trainer._model, named, (), given).logits[0].log_softmax(-1)
    assert [float(table[2, 3]), float(table[3, 4])] == pytest.approx(expected, abs=1e-5)


def test_the_reference_of_an_adapter_is_the_model_without_it(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, adapter=RANK, learning_rate=1e-1, kl_weight=0.1)
    reference = trainer._learning.reference
    assert isinstance(reference, WithoutAdapter)
    (part,) = micro_batches([row((1, 4, 13), (3, 4))], TrainerConfig(), CPU)
    before = reference.read(part).logprobs.detach()
    assert trainer.step(STEP).metrics["kl"] > 0
    assert torch.equal(reference.read(part).logprobs, before)
    assert not torch.allclose(trainer._policy.read(part).logprobs, before, atol=1e-3)


def test_where_passes_are_in_bf16_the_base_is_held_in_it(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, adapter=RANK, precision="bfloat16", learning_rate=1e-2)
    kinds = {p.requires_grad: p.dtype for p in trainer._model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    done = trainer.step(STEP)
    assert done.metrics["optimizer_steps"] == 2
    assert done.metrics["grad_norm"] > 0


def test_targets_are_all_linear_layers_but_the_head_and_a_model_without_is_refused_in_a_line() -> None:
    found = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert targets_of(tiny_model(0)) == found
    old: Any = GPT2LMHeadModel
    with pytest.raises(UserError, match=r"no linear layers of torch's[^\n]*$"):
        targets_of(old(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=14)))
