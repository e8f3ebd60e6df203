"""How the learning rate goes: each schedule by hand, and in a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.learner.messages import Train
from swarm.learner.trainer import Trainer
from swarm.learner.update import FLOOR, scheduled_share
from swarm.types import Schedule
from tests.unit.trainers import group, saved, trainer_in, weights

HALF_COSINE = 0.1 + 0.9 / 2


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        # At steps 0, 9, 10, 60, 100, 110 and 500 of 110, the first ten of them warm-up.
        ("constant", (0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
        ("linear", (0.1, 1.0, 1.0, 0.55, 0.19, 0.1, 0.1)),
        ("cosine", (0.1, 1.0, 1.0, HALF_COSINE, 0.122, 0.1, 0.1)),
        ("wsd", (0.1, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1)),
    ],
)
def test_each_schedule_by_hand(schedule: Schedule, shares: tuple[float, ...]) -> None:
    found = [scheduled_share(schedule, step, steps=110, warmup_steps=10) for step in (0, 9, 10, 60, 100, 110, 500)]
    assert found == pytest.approx(shares, abs=5e-4)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_it_never_rises_after_the_warm_up_and_needs_none(schedule: Schedule) -> None:
    shares = [scheduled_share(schedule, step, steps=50, warmup_steps=0) for step in range(60)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[50] == FLOOR
    assert scheduled_share(schedule, 4, steps=5, warmup_steps=10) == 0.5, "a run shorter than its warm-up only rises"


def test_a_rate_that_was_set_is_scaled_by_the_schedule_and_gives_what_a_run_with_it_gives(tmp_path: Path) -> None:
    """Bit for bit, and after a checkpoint too: the rate is no part of what a checkpoint holds."""
    rules: dict[str, Any] = {"learning_rate": 1e-2, "schedule": "linear", "steps": 11}
    trainer, twin = trainer_in(tmp_path / "set", **rules), trainer_in(tmp_path / "twin", **rules)
    as_set = [_step(trainer, step, rate) for step, rate in ((0, None), (1, None), (6, 2e-3))]
    assert as_set == pytest.approx([1e-2, 1e-2, 1.1e-3])
    for step in (0, 1):
        _step(twin, step, None)
    resumed = trainer_in(tmp_path / "resumed", **rules, resume=saved(twin, tmp_path / "kept", 2))
    assert _step(resumed, 6, 2e-3) == as_set[-1]
    assert _step(twin, 6, None) == pytest.approx(5.5e-3)
    assert torch.equal(weights(resumed), weights(trainer))
    assert not torch.equal(weights(trainer), weights(twin))
    assert _step(trainer, 7, None) == pytest.approx(4.6e-3), "without one the configured one holds"


def _step(trainer: Trainer, step: int, rate: float | None) -> float:
    command = Train(step=step, groups=(group([1.0, 0.0, 0.5, 0.1]),), learning_rate=rate)
    return trainer.step(command).metrics["learning_rate"]
