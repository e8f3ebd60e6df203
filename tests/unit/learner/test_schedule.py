"""How the learning rate goes: each schedule by hand, and in a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.learner.messages import Train
from swarm.learner.update import scheduled_share
from swarm.types import Schedule
from tests.unit.trainers import group, trainer_in

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
    found = [
        scheduled_share(schedule, step, steps=110, warmup_steps=10, floor=0.1) for step in (0, 9, 10, 60, 100, 110, 500)
    ]
    assert found == pytest.approx(shares, abs=5e-4)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_it_never_rises_after_the_warm_up_and_needs_none(schedule: Schedule) -> None:
    shares = [scheduled_share(schedule, step, steps=50, warmup_steps=0, floor=0.0) for step in range(60)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[50] == 0.0


def test_a_run_shorter_than_its_warm_up_only_rises() -> None:
    assert scheduled_share("linear", 4, steps=5, warmup_steps=10, floor=0.1) == 0.5


def test_a_learner_step_takes_the_scheduled_rate(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, learning_rate=1e-2, schedule="linear", steps=11)
    rates = [trainer.step(Train(step=step, groups=(group([1.0, 0.0]),))).metrics["learning_rate"] for step in (0, 1, 6)]
    assert rates == pytest.approx([1e-2, 1e-2, 5e-3])
