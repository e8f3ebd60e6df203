"""Claims about weights that the learner no longer has, on the tiny model; and when they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from swarm.broadcast.version.manifest import TensorSpec
from swarm.learner.alarms import MISMATCH_STEPS, Mismatch
from swarm.learner.comparison import COMPARED_ROLLOUTS, COMPARED_SHARE, Comparison
from swarm.learner.messages import Train, Trained, TrainGroup
from swarm.learner.trainer import Trainer
from tests.unit.learner.test_alarms import agreed, kinds, weights
from tests.unit.trainers import group, trainer_in

REWARDS = [1.0, 0.0, 0.0, 0.0]
OLD = 9  # Older than any weights that are kept here


def moved_on(directory: Path, *, shift: float = 0.0, stages: bool = True) -> tuple[Trainer, Trained]:
    """A trainer that has taken large steps, and its step on claims about its first weights, `shift` too high."""
    trainer = trainer_in(directory, learning_rate=0.1)
    if stages:
        trainer.prepared()
    early = agreed(trainer, REWARDS, staleness=2, shift=shift)
    for number in range(2):
        trainer.step(Train(step=number, groups=(aged(group(REWARDS), OLD),)))
        if stages:
            trainer.stage()
    return trainer, trainer.step(Train(step=2, groups=(early,)))


def aged(made: TrainGroup, staleness: int, *, mixed: bool = False) -> TrainGroup:
    rollouts = [structs.replace(one, staleness=staleness, mixed=mixed) for one in made.rollouts]
    return structs.replace(made, rollouts=tuple(rollouts))


def test_claims_about_weights_that_moved_on_are_compared_with_those_weights(tmp_path: Path) -> None:
    _, honest = moved_on(tmp_path / "honest")
    assert honest.alarms == ()
    assert honest.metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-4)
    assert sum(tokens for _, tokens in honest.mismatches.values()) > 0
    _, falsified = moved_on(tmp_path / "falsified", shift=2.0)
    assert kinds(falsified.alarms) == [("mismatch_kl", "none")]
    assert falsified.metrics["mismatch_kl"] > 1.0
    assert falsified.metrics["optimizer_steps"] == 2
    moved, _ = moved_on(tmp_path / "again")
    now = agreed(moved, REWARDS, staleness=0, shift=0.0)
    then = agreed(trainer_in(tmp_path / "then"), REWARDS)
    claimed, present = (
        torch.frombuffer(bytearray(one.rollouts[0].logprobs), dtype=torch.float32) for one in (then, now)
    )
    assert (claimed - present).abs().max() > 0.5


def test_to_compare_changes_no_weight_and_no_generator(tmp_path: Path) -> None:
    """So a trainer that repeats steps, and does not compare at the same ones, comes out alike."""
    compared, found = moved_on(tmp_path / "compared", shift=2.0)
    states = compared._learning.shuffle.get_state(), torch.get_rng_state()
    plain, absent = moved_on(tmp_path / "plain", shift=2.0, stages=False)
    assert "mismatch_kl" in found.metrics
    assert "mismatch_kl" not in absent.metrics
    assert torch.equal(weights(compared), weights(plain))
    assert torch.equal(states[0], plain._learning.shuffle.get_state())
    assert torch.equal(states[1], torch.get_rng_state())


def test_ten_mismatches_in_a_row_stop(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, learning_rate=1e-6)
    trainer.prepared()
    raised: list[tuple[str, str]] = []
    for number in range(2 * MISMATCH_STEPS):
        early = agreed(trainer, REWARDS, staleness=1, shift=2.0)
        done = trainer.step(Train(step=number, groups=(early if number % 2 else aged(group(REWARDS), OLD),)))
        trainer._comparison.trained_s = 1e6  # So there is time to compare again at once
        trainer.stage()
        raised += kinds(done.alarms)
    assert raised == [("mismatch_kl", "none")] * (MISMATCH_STEPS - 1) + [("mismatch_kl", "stop")]


class Clock:
    """Time that passes only when something takes time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def comparison_in(directory: Path, clock: Clock) -> tuple[Comparison, Path]:
    staging = directory / "staging.bin"
    staging.write_bytes(bytes(8))
    tensors = {TensorSpec(name="weight", dtype="BF16", shape=(4,)): torch.ones(4)}
    return Comparison(tensors, clock), staging


def asked_of(comparison: Comparison, groups: Sequence[TrainGroup], step: int) -> list[TrainGroup]:
    """What is compared of a batch."""
    asked: list[TrainGroup] = []

    def compare(picked: Sequence[TrainGroup], weights: dict[str, torch.Tensor]) -> list[Mismatch]:
        asked.extend(picked)
        return []

    comparison.found(groups, step, compare)
    return asked


def test_what_is_compared_takes_less_than_its_share_whatever_it_costs(tmp_path: Path) -> None:
    clock = Clock()
    comparison, staging = comparison_in(tmp_path, clock)
    at: list[int] = []

    def compare(groups: Sequence[TrainGroup], weights: dict[str, torch.Tensor]) -> list[Mismatch]:
        at.append(step)
        clock.now_s += 0.2
        return []

    for step in range(1000):
        comparison.staged(staging, step)
        comparison.found([aged(group([0.0] * 8), 1)], step, compare)
        comparison.trained_s += 1.0
        if step >= 20:  # Until then the first one, whose cost nobody knew, is more than its share
            assert comparison.spent_s <= COMPARED_SHARE * comparison.trained_s
    assert at[0] == 1
    assert comparison.spent_s > 0.9 * COMPARED_SHARE * comparison.trained_s


@pytest.mark.parametrize(
    ("groups", "is_compared"),
    [
        ([aged(group([0.0] * 4), 3), aged(group([0.0] * 4), 4)], True),
        ([aged(group([0.0] * 3), 3), aged(group([0.0] * 4), 4)], False),
        ([aged(group([0.0] * 4), 3, mixed=True), aged(group([0.0] * 3), 3)], False),
        ([aged(group([0.0] * 40), 3) for _ in range(3)], True),
    ],
)
def test_half_of_a_batch_has_to_be_drawn_by_the_kept_weights_alone(
    tmp_path: Path, groups: list[TrainGroup], is_compared: bool
) -> None:
    comparison, staging = comparison_in(tmp_path, Clock())
    comparison.staged(staging, 4)
    asked = asked_of(comparison, groups, 7)
    assert bool(asked) == is_compared
    assert len(asked) <= COMPARED_ROLLOUTS
    assert all(one.staleness == 3 and not one.mixed for made in asked for one in made.rollouts)


def test_what_is_staged_later_does_not_change_the_kept_weights(tmp_path: Path) -> None:
    comparison, staging = comparison_in(tmp_path, Clock())
    staging.write_bytes(torch.full((4,), 2.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    comparison.staged(staging, 0)
    with staging.open("r+b") as file:
        file.write(bytes(8))
    comparison.staged(staging, 1)
    read: list[list[float]] = []

    def compare(groups: Sequence[TrainGroup], weights: dict[str, torch.Tensor]) -> list[Mismatch]:
        read.extend(kept.tolist() for kept in weights.values())
        return []

    comparison.found([aged(group([0.0] * 2), 2)], 2, compare)
    assert read == [[2.0] * 4]
    assert not (tmp_path / "compared.bin").exists()


def test_a_disk_without_room_costs_the_comparison_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison, staging = comparison_in(tmp_path, Clock())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("swarm.learner.comparison.copy_parts", full)
        comparison.staged(staging, 0)
    assert comparison.found([aged(group([0.0] * 2), 1)], 1, lambda *_: pytest.fail("nothing is kept")) == []
    comparison.staged(staging, 1)
    assert asked_of(comparison, [aged(group([0.0] * 2), 1)], 2)
