"""A trainer that is saved and restored is the same trainer, bit for bit."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarm.broadcast.store import disk
from swarm.broadcast.store.base_model import BaseModel
from swarm.broadcast.version.manifest import ByteSpan, tensor_spans
from swarm.errors import UserError
from swarm.learner.checkpoint.files import (
    ADAPTER_WEIGHTS,
    TENSORS,
    _locked,
    is_whole,
    newest_whole,
    read_state,
    whole_checkpoints,
)
from swarm.learner.checkpoint.saving import Snapshot, take
from swarm.learner.messages import AlarmState, ClaimState, Save, Saved, Train
from swarm.learner.tiny import tiny_model
from swarm.learner.trainer import EXPERTS, Trainer
from swarm.models.device import as_streamed
from swarm.types import OptimizerStates
from tests.unit.models import model_directory, moe_model
from tests.unit.trainers import group, saved, trainer_in, weights

IDS = torch.tensor([[1, 3, 4, 5, 13, 3, 4]])


def train(trainer: Trainer, steps: range) -> None:
    """Batches that differ from step to step, in several rows, so that the order of the shuffle matters."""
    for step in steps:
        groups = (group([1.0, 0.0, float(step % 3), 0.5]), group([0.0, 1.0, 0.25, 0.0], logprob=-2.0 - step / 10))
        trainer.step(Train(step=step, groups=groups, lineage=bytes([step] * 32)))


def save(trainer: Trainer, root: Path, step: int) -> Path:
    directory = root / f"step-{step:06}"
    trainer.save(Save(directory=str(directory), step=step))
    return directory


def snapshot_of(trainer: Trainer) -> Snapshot:
    return take(trainer._learning, step=0, lineage=b"", alarms=AlarmState(), claims=ClaimState())


def everything(trainer: Trainer) -> dict[str, list[Any]]:
    """All that a checkpoint holds of a trainer, as numbers."""
    tensors = snapshot_of(trainer).tensors
    return {name: one.view(torch.uint8).tolist() if one.dim() else one.tolist() for name, one in tensors.items()}


def saved_weights(directory: Path) -> torch.Tensor:
    held = load_file(directory / TENSORS)
    model = tiny_model(0)
    return torch.cat([held[f"weight/{name}"].flatten() for name, _ in model.named_parameters()])


ADAPTER = 4


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["whole", "adapter"])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path, at: int, adapter: int | None) -> None:
    straight = trainer_in(tmp_path / "straight", adapter=adapter)
    layout = straight.prepared().layout
    train(straight, range(5))
    straight.stage()
    expected = everything(straight)

    before = trainer_in(tmp_path / "before", adapter=adapter)
    before.prepared()
    train(before, range(at))
    directory = save(before, tmp_path, at)
    before.stage()
    assert before.flush() == Saved(step=at, fault="")
    torch.manual_seed(12345)

    after = trainer_in(tmp_path / "after", resume=directory, adapter=adapter)
    prepared = after.prepared()
    assert (prepared.step, prepared.lineage) == (at, bytes([at - 1] * 32) if at else b"")
    assert prepared.layout == layout
    assert (tmp_path / "after/staging.bin").read_bytes() == (tmp_path / "before/staging.bin").read_bytes()
    train(after, range(at, 5))
    after.stage()
    assert everything(after) == expected
    held = "model.embed_tokens.weight" if adapter is None else "model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert f"adam/exp_avg_sq/{held}" in expected
    assert (tmp_path / "after/staging.bin").read_bytes() == (tmp_path / "straight/staging.bin").read_bytes()


@pytest.mark.parametrize("before", ["float32", "8bit", "host"])
@pytest.mark.parametrize("states", ["float32", "8bit", "host"])
def test_a_run_goes_on_with_its_moments_elsewhere(
    tmp_path: Path, before: OptimizerStates, states: OptimizerStates
) -> None:
    """Bit for bit between the device and the host; from and to 8 bits as near as these are."""
    # Rows of whole blocks
    wide = model_directory(tmp_path / "wide", hidden_size=256, intermediate_size=256)
    rest: dict[str, Any] = {"model": wide, "learning_rate": 1e-4}
    first = trainer_in(tmp_path / "first", optimizer_states=before, **rest)
    train(first, range(2))
    directory = save(first, tmp_path, 2)
    assert first.flush() == Saved(step=2, fault="")
    after = trainer_in(tmp_path / "after", optimizer_states=states, resume=directory, **rest)
    resumed = weights(after)
    assert torch.equal(resumed, weights(first))
    for trainer in (first, after):
        train(trainer, range(2, 3))
    held = load_file(directory / TENSORS)
    assert held["adam/exp_avg/model.layers.0.mlp.up_proj.weight"].any()
    scale = "adam/exp_avg_scale/model.layers.0.mlp.up_proj.weight"
    assert held[scale].shape == (256, 1) if before == "8bit" else scale not in held
    assert not torch.equal(weights(after), resumed)
    if "8bit" not in (before, states) or before == states:
        assert everything(after) == everything(first)
    else:
        moved = (weights(first) - resumed).abs().mean()
        assert 0 < (weights(after) - weights(first)).abs().mean() < moved / 10


def test_draws_go_on_where_they_were(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    torch.rand(3)
    directory = saved(trainer, tmp_path / "step-000000", 0)
    expected = torch.rand(3).tolist()
    trainer_in(tmp_path, resume=directory)
    assert torch.rand(3).tolist() == expected


def test_a_mixture_of_experts_learns_and_its_checkpoint_is_what_is_published(tmp_path: Path) -> None:
    base = model_directory(tmp_path / "base", moe_model(0))
    trainer = trainer_in(tmp_path / "run", model=base)
    prepared = trainer.prepared()
    layout = prepared.layout
    assert EXPERTS in prepared.notes
    assert EXPERTS not in trainer_in(tmp_path / "dense").prepared().notes
    before = {name: parameter.detach().clone() for name, parameter in trainer._model.named_parameters()}
    train(trainer, range(2))
    assert all(not torch.equal(parameter, before[name]) for name, parameter in trainer._model.named_parameters())
    directory = save(trainer, tmp_path, 2)
    assert trainer.flush() == Saved(step=2, fault="")
    resumed = trainer_in(tmp_path / "after", model=base, resume=directory)
    assert everything(resumed) == everything(trainer)

    # A checkpoint has a name for each matrix of an expert, and the stream for the group.
    trainer.stage()
    local = BaseModel(directory)
    named = local.named_as_here(layout)
    whole = ByteSpan(start=0, nbytes=layout.total_bytes)
    assert len(named.tensors) == len(layout.tensors) + 2 * (3 * 4 - 2)
    assert local.fill(named, tensor_spans(named), whole) == (tmp_path / "run/staging.bin").read_bytes()


# -- beside training -----------------------------------------------------------------------------------------


def test_a_checkpoint_does_not_see_the_steps_taken_while_it_is_written(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    train(trainer, range(1))
    tmp_path.joinpath("checkpoints").mkdir()
    with ThreadPoolExecutor(1) as pool:
        with _locked(tmp_path / "checkpoints", wait=True):
            # Nothing can be written until this lock is let go; the call comes back at once nevertheless.
            directory = save(trainer, tmp_path / "checkpoints", 1)
            at_save = weights(trainer)
            step = pool.submit(train, trainer, range(1, 2))
            assert not wait([step], timeout=0.5).done, "the step would change what is being written"
            assert not directory.exists()
            assert torch.equal(weights(trainer), at_save)
        step.result()
    assert trainer.flush() == Saved(step=1, fault="")
    assert torch.equal(saved_weights(directory), at_save)
    assert not torch.equal(weights(trainer), at_save)
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(
        loaded.lm_head.weight, as_streamed(trainer_in(tmp_path, resume=directory)._model.lm_head.weight).float()
    )
    assert read_state(directory).lineage == bytes([0] * 32).hex()


def test_what_was_copied_is_written_beside_training(tmp_path: Path) -> None:
    """As with several ranks, or on a GPU."""
    trainer = trainer_in(tmp_path / "run")
    snapshot = replace(snapshot_of(trainer), is_shared=False)
    is_over = Event()

    def write() -> None:
        assert is_over.wait(60)

    trainer._saver.start(snapshot, write)
    train(trainer, range(1))
    assert trainer._saver.report() == Saved(step=None, fault="")
    is_over.set()
    assert trainer.flush() == Saved(step=0, fault="")


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    for step in range(3):
        save(trainer, tmp_path / "checkpoints", step)
    assert trainer.flush() == Saved(step=2, fault="")
    assert [found.step for found in whole_checkpoints(tmp_path / "checkpoints")] == [0, 1, 2]


def test_a_full_disk_is_told_once_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path / "run")
    root = tmp_path / "checkpoints"
    save(trainer, root, 1)
    trainer.flush()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "SPARE_BYTES", 1 << 60)
        save(trainer, root, 2)
        trainer._saver.wait()
    done = trainer.step(Train(step=1, groups=(group([1.0, 0.0]),)))
    assert done.saved.step == 1
    assert done.saved.fault.startswith(f"the disk of {root} has no room for the checkpoint step-000002: free ")
    assert trainer.flush() == Saved(step=1, fault="")
    save(trainer, root, 2)
    assert trainer.flush() == Saved(step=2, fault="")


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    root = tmp_path / "checkpoints"
    save(trainer, root, 1)
    trainer.flush()
    with files_of_at_most(100_000):
        save(trainer, root, 2)
        found = trainer.flush()
    assert found.step == 1
    assert re.search(r"^the checkpoint of step 2 could not be saved: .*File too large", found.fault)
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["step-000001"]
    assert is_whole(root / "step-000001")


# -- the wrong checkpoint ------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_of_another_model_torn_or_absent_is_one_line_for_the_user(tmp_path: Path) -> None:
    directory = saved(trainer_in(tmp_path), tmp_path / "step-000001", 1)
    wider = model_directory(tmp_path / "wider", intermediate_size=256)
    with pytest.raises(UserError, match=r"of a model of [\d,]+ parameters, not of one of"):
        trainer_in(tmp_path, model=wider, resume=directory)
    held, whole = load_file(directory / TENSORS), (directory / TENSORS).read_bytes()
    held["weight/model.norm.bias"] = held.pop("weight/model.norm.weight")
    save_file(held, directory / TENSORS)
    with pytest.raises(UserError, match=r"is of another model: model.norm.weight differs"):
        trainer_in(tmp_path, resume=directory)
    for damage in (lambda path: path.write_bytes(whole[:1000]), Path.unlink):
        damage(directory / TENSORS)
        with pytest.raises(UserError, match=r"trainer.safetensors cannot be read"):
            trainer_in(tmp_path, resume=directory)
    with pytest.raises(UserError, match="is not a checkpoint"):
        trainer_in(tmp_path, resume=tmp_path / "nowhere")
    assert newest_whole(tmp_path) is None


# -- an adapter ----------------------------------------------------------------------------------------------


def test_a_checkpoint_of_an_adapter_holds_no_weight_that_is_frozen_and_goes_on_beside_the_same_alone(
    tmp_path: Path,
) -> None:
    trainer = trainer_in(tmp_path, adapter=ADAPTER)
    train(trainer, range(1))
    directory = saved(trainer, tmp_path / "step-000001", 1)
    held = load_file(directory / TENSORS)
    trained, moments = ({n for n in held if n.startswith(kind)} for kind in ("weight/", "adam/exp_avg_sq/"))
    assert len(trained) == len(moments) == 2 * 14
    assert all("lora_" in name for name in trained | moments)
    written = load_file(directory / ADAPTER_WEIGHTS)
    assert {name.removeprefix("base_model.model.") for name in written} == {n.partition("/")[2] for n in trained}
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert is_whole(directory)
    with pytest.raises(UserError, match="trained with other frozen weights"):
        trainer_in(tmp_path / "other", resume=directory, adapter=ADAPTER, seed=1)
    with pytest.raises(UserError, match=r"is of a model of .* parameters, not of one of"):
        trainer_in(tmp_path / "whole", resume=directory)
    trainer_in(tmp_path / "same", resume=directory, adapter=ADAPTER)
