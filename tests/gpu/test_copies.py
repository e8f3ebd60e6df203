"""What leaves the device is what was there when it was asked for, whatever the device does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch

from swarm.learner.checkpoint.model_files import read_stored, stream_tensors, write_staging
from swarm.learner.checkpoint.saving import Saver, Snapshot
from swarm.learner.messages import Save, Train
from swarm.models.device import as_streamed
from tests.unit.trainers import group, trainer_in

BATCH = (group([0.0, 1.0]), group([1.0, 0.5]))
MANY = 1 << 22  # Items of a tensor


def busy(device: torch.device) -> torch.Tensor:
    """Something that keeps a GPU occupied for some milliseconds, after which its result is needed."""
    made = torch.ones(1024, 1024, device=device)
    for _ in range(64 if device.type == "cuda" else 1):
        made = made @ made / 1024
    return made


def test_staged_weights_are_those_of_the_moment(device: torch.device, tmp_path: Path) -> None:
    model = torch.nn.Linear(MANY // 1024, 1024, device=device)
    tensors = stream_tensors(model)
    for turn in range(2):
        with torch.no_grad():
            model.weight.copy_(busy(device)[:1, :1] * torch.randn(1024, MANY // 1024, device=device))
        write_staging(tensors, tmp_path / "staging.bin")
        stored = [kept for _, kept in read_stored(tensors, tmp_path / "staging.bin")]
        expected = [as_streamed(tensor.detach().cpu()) for tensor in tensors.values()]
        assert all(torch.equal(*pair) for pair in zip(stored, expected, strict=True)), turn


class LateSaver(Saver):
    """Writes when it is asked what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = Event()

    def start(self, snapshot: Snapshot, write: Callable[[], None]) -> None:
        def late() -> None:
            self._asked.wait()
            write()

        super().start(snapshot, late)

    def wait(self, *, only_shared: bool = False) -> None:
        # On a CPU an optimiser step waits for what it would change.
        if not only_shared or (self._running is not None and self._running[0].is_shared):
            self._asked.set()
        super().wait(only_shared=only_shared)
        self._asked.clear()


def test_a_checkpoint_taken_while_training_goes_on_is_that_of_its_step(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is read before the steps that would spoil it.
    monkeypatch.setattr("swarm.learner.trainer.Saver", LateSaver)

    def trained(directory: Path, *, steps_after: int) -> bytes:
        trainer = trainer_in(directory, device=str(device))
        trainer.prepared()
        trainer.step(Train(step=0, groups=BATCH, lineage=b"one"))
        trainer.save(Save(directory=str(directory / "step-000001"), step=1))
        for step in range(1, 1 + steps_after):
            trainer.step(Train(step=step, groups=BATCH, lineage=b"more"))
        assert trainer.flush().step == 1
        return (directory / "step-000001" / "model.safetensors").read_bytes()

    at_once = trained(tmp_path / "alone", steps_after=0)
    assert at_once == trained(tmp_path / "beside", steps_after=2)
