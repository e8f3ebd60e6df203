"""The best version on disk: a model that loads, whose weights are those that were published, whatever cuts it off."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.broadcast.store.disk import DiskFull
from swarm.broadcast.version.manifest import ITEM_BYTES, trained_spans
from swarm.learner.messages import AdapterRules, Train
from swarm.learner.models import tiny_model
from swarm.node.best import ABOUT, BestModel, hold_weights
from tests.builders import MIXED_LAYOUT, v
from tests.unit.models import frozen, published
from tests.unit.trainers import group, trainer_in

FIGURES = {"exact_match": 0.5, "reward": 0.25}


class Kept:
    """A run directory, and what is said and written of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.held = directory / "held.bin"
        self.said: list[str] = []
        self.events: list[str] = []
        self.best = self.reopen()

    def reopen(self) -> BestModel:
        return BestModel(
            self.directory, self.held, emit=lambda kind, **_: self.events.append(kind), say=self.said.append
        )


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


async def test_it_loads_and_is_bit_by_bit_what_was_staged(tmp_path: Path, kept: Kept) -> None:
    trainer = trainer_in(tmp_path)
    layout = trainer.prepared().layout
    staging = tmp_path / "staging.bin"
    staged = staging.read_bytes()
    hold_weights(staging, kept.held, layout)
    await kept.best.keep(v(3), FIGURES, layout)
    assert kept.said == []
    assert json.loads((tmp_path / "best/config.json").read_text())["dtype"] == "bfloat16"
    assert len({path.stat().st_mode for path in (tmp_path / "best").iterdir()}) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert model.dtype == torch.bfloat16
    found = model.state_dict()
    at = 0
    for spec in layout.tensors:
        wanted = torch.frombuffer(bytearray(staged[at : at + spec.nbytes]), dtype=torch.int16)
        for name in (spec.name, *spec.aliases):
            assert torch.equal(found[name].flatten().view(torch.int16), wanted), name
        assert spec.nbytes == wanted.numel() * ITEM_BYTES[spec.dtype]
        at += spec.nbytes
    assert AutoTokenizer.from_pretrained(tmp_path / "best")("12=").input_ids
    assert json.loads((tmp_path / "best" / ABOUT).read_text()) == {"version": 3, "incarnation": 0, **FIGURES}


async def test_of_an_adapter_the_adapter_is_held_and_kept_as_peft_loads_it(tmp_path: Path, kept: Kept) -> None:
    from peft import PeftModel

    trainer = trainer_in(tmp_path, adapter=AdapterRules(rank=4, alpha=8.0), learning_rate=1e-1)
    layout = trainer.prepared().layout
    trainer.step(Train(step=0, groups=(group([1.0, 0.0]),)))
    trainer.stage()
    staging = tmp_path / "staging.bin"
    hold_weights(staging, kept.held, layout)
    assert staging.stat().st_nlink == 1
    (adapter,) = trained_spans(layout.tensors)
    held = kept.held.read_bytes()
    assert held == bytes(adapter.start) + staging.read_bytes()[adapter.start :]
    await kept.best.keep(v(3), FIGURES, layout)
    assert kept.said == []
    best = tmp_path / "best"
    assert (best / "adapter_model.safetensors").stat().st_size < adapter.nbytes + 8192
    assert {"config.json", "model.safetensors"}.isdisjoint(path.name for path in best.iterdir())
    model = PeftModel.from_pretrained(frozen(tiny_model(0)), best)
    ids = torch.tensor([[1, 4, 13, 3, 5]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, published(trainer._model)(input_ids=ids).logits)


def test_to_be_measured_costs_no_copy(tmp_path: Path, kept: Kept) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"abc")
    hold_weights(weights, kept.held, MIXED_LAYOUT)
    assert os.path.samefile(weights, kept.held)
    kept.best.forget()
    assert weights.read_bytes() == b"abc"


def test_where_a_file_has_one_name_it_is_copied(tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"abc")
    hold_weights(weights, kept.held, MIXED_LAYOUT)
    weights.write_bytes(b"xyz")
    assert kept.held.read_bytes() == b"abc"


async def keep(kept: Kept, version: int) -> None:
    kept.held.write_bytes(bytes([version]) * MIXED_LAYOUT.total_bytes)
    await kept.best.keep(v(version), {"exact_match": version / 10, "reward": 0.5}, MIXED_LAYOUT)


def _full(directory: Path, nbytes: int, what: str) -> None:
    raise DiskFull(f"the disk of {directory} has no room for {what}: free 9 MB there")


async def test_a_full_disk_leaves_the_former_best_and_says_so(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    await keep(kept, 1)
    monkeypatch.setattr("swarm.node.best.require_room", _full)
    await keep(kept, 2)
    assert kept.events == ["best", "best_failed"]
    assert "version 0.2 is the best so far and could not be kept" in kept.said[0]
    assert "free 9 MB" in kept.said[0]
    assert kept.reopen().known == kept.best.known == {"version": 1, "incarnation": 0, "exact_match": 0.1, "reward": 0.5}


@pytest.mark.parametrize(
    ("exact", "reward", "better"), [(0.2, 0.0, True), (0.1, 0.6, True), (0.1, 0.5, False), (0.0, 0.9, False)]
)
async def test_better_is_more_right_answers_then_more_reward(
    kept: Kept, exact: float, reward: float, better: bool
) -> None:
    await keep(kept, 1)
    assert kept.best.is_better({"exact_match": exact, "reward": reward}) == better


async def test_weights_that_were_given_up_meanwhile_are_not_kept(kept: Kept) -> None:
    await kept.best.keep(v(1), FIGURES, MIXED_LAYOUT)
    assert kept.events == ["best_failed"]
    assert "had no room for its weights" in kept.said[0]
    assert kept.best.known is None


def _cut_off_while_written(directory: Path) -> None:
    shutil.copytree(directory / "best", directory / "best.partial")
    (directory / "best.partial" / "digests.json").unlink()


def _cut_off_between_renames(directory: Path) -> None:
    shutil.copytree(directory / "best", directory / "best.removed.partial")
    (directory / "best").rename(directory / "best.partial")


def _cut_off_while_the_old_one_is_removed(directory: Path) -> None:
    shutil.copytree(directory / "best", directory / "best.removed.partial")
    (directory / "best.removed.partial" / ABOUT).unlink()


@pytest.mark.parametrize(
    "cut_off", [_cut_off_while_written, _cut_off_between_renames, _cut_off_while_the_old_one_is_removed]
)
async def test_after_a_crash_there_is_one_whole_best(kept: Kept, cut_off: Callable[[Path], Any]) -> None:
    await keep(kept, 1)
    kept.held.write_bytes(b"left behind")
    cut_off(kept.directory)
    assert kept.reopen().known == kept.best.known
    assert sorted(path.name for path in kept.directory.iterdir()) == ["best"]
