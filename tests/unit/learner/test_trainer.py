"""A learner step on the tiny model, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swarm.errors import UserError
from swarm.learner.messages import Train
from swarm.learner.ranks import Ranks
from swarm.learner.trainer import Commands, Trainer
from swarm.models.device import as_streamed
from swarm.process import NoParent
from swarm.types import ObjectiveName
from tests.unit.models import model_directory
from tests.unit.trainers import group, saved, trainer_in, weights


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return trainer_in(tmp_path)


def test_a_step_that_does_not_follow_the_one_before_is_refused(trainer: Trainer) -> None:
    commands = Commands(NoParent(), Ranks())
    commands._trainer = trainer
    batch = (group([0.5, 0.5]),)
    commands.handle(Train(step=0, groups=batch))
    for step in (0, 2):
        with pytest.raises(ValueError, match=f"step {step} does not follow the 1 steps taken"):
            commands.handle(Train(step=step, groups=batch))


def test_a_batch_without_variance_changes_nothing_and_counts_and_rewards_too_large_to_square_end_no_run(
    trainer: Trainer,
) -> None:
    before = weights(trainer)
    done = trainer.step(Train(step=0, groups=(group([0.5, 0.5]), group([1.0, 1.0]))))
    assert torch.equal(weights(trainer), before)
    assert done.metrics["optimizer_steps"] == 0
    assert done.metrics["frac_reward_zero_std"] == 1.0
    # Nodes refuse such a reward; what comes to the trainer all the same is computed with.
    figures = trainer.step(Train(step=1, groups=(group([1e160, 0.0, 0.0, 0.0]),))).metrics
    assert figures["optimizer_steps"] == 2


def test_groups_without_variance_count_in_the_mean(tmp_path: Path) -> None:
    """A few that teach would pull as hard as many: such steps had the largest gradients."""
    taught, flat = group([1.0, 0.0]), group([1.0, 1.0])
    alone = trainer_in(tmp_path / "alone", minibatches=1).step(Train(step=0, groups=(taught,))).metrics
    among = trainer_in(tmp_path / "among", minibatches=1).step(Train(step=0, groups=(flat, taught, flat))).metrics
    for name in ("loss", "grad_norm"):
        assert among[name] == pytest.approx(alone[name] / 3, rel=1e-4)
    assert among["entropy"] == alone["entropy"]


@pytest.mark.parametrize("objective", ["grpo", "icepop"])
def test_passes_in_bf16_are_of_the_weights_that_are_published(tmp_path: Path, objective: ObjectiveName) -> None:
    """Rounded to the nearest they would not see that anything moved."""
    groups = (group([1.0, 0.0, 0.5]),)
    found = []
    for name in ("masters", "published", "nearest"):
        trainer = trainer_in(tmp_path / name, learning_rate=0.0, objective=objective, precision="bfloat16")
        with torch.no_grad():
            for one in (one for one in trainer._model.parameters() if one.dim() > 1):
                one *= 1 + 2.0**-10
                one.copy_((one.view(torch.int32) & ~1).view(torch.float32))  # The bit that is not kept
                if name != "masters":
                    one.copy_(as_streamed(one) if name == "published" else one.bfloat16())
        before = weights(trainer)
        found.append(trainer.step(Train(step=0, groups=groups)).metrics)
        assert torch.equal(weights(trainer), before)
    masters, published, nearest = found
    assert masters == published
    assert masters["entropy"] != nearest["entropy"]


def test_a_minibatch_that_is_not_finite_is_not_in_the_mean_of_the_others(tmp_path: Path) -> None:
    """Of four minibatches of a row each two are not."""
    taught = group([1.0, 0.0], logprob=-2.0)
    alone = trainer_in(tmp_path / "alone", minibatches=2, learning_rate=0.0)
    beside = trainer_in(tmp_path / "beside", minibatches=4, learning_rate=0.0)
    expected = alone.step(Train(step=0, groups=(taught,))).metrics
    found = beside.step(Train(step=0, groups=(taught, group([float("nan"), 1.0])))).metrics
    assert found["optimizer_steps_skipped"] == 2
    assert expected["loss"] > 0.1
    for name in ("loss", "grad_norm", "entropy", "clip_ratio/low_mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_memory_that_runs_out_in_a_step_is_one_line(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin again from the checkpoint, as after other faults, would end in the same way."""

    def step(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(trainer._update, "step", step)
    with pytest.raises(UserError, match=r"longest row has 5 tokens .* fewer --tokens-per-micro-batch") as caught:
        trainer.step(Train(step=0, groups=(group([1.0, 0.0]),)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "stops"), [(3, (3, 2)), (None, (2,)), ([99999, 2], (2,)), (-1, (2,)), ([3, 4], (3, 4, 2))]
)
def test_a_turn_ends_with_what_any_file_says_that_the_vocabulary_has(
    tmp_path: Path, said: int | list[int] | None, stops: tuple[int, ...]
) -> None:
    """2 is the tokenizer's."""
    model = Path(model_directory(tmp_path / "base"))
    for name in ("config.json", "generation_config.json"):
        found = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(found | {"eos_token_id": said}))
    assert trainer_in(tmp_path, model=str(model)).prepared().stop_token_ids == stops


def test_a_life_tells_what_its_run_began_with(tmp_path: Path) -> None:
    first = trainer_in(tmp_path)
    weights = first.prepared().weights
    first.step(Train(step=0, groups=(group([1.0, 0.0]),), lineage=b""))
    again = trainer_in(tmp_path, resume=saved(first, tmp_path / "step-000001", 1)).prepared()
    assert (again.step, again.weights) == (1, weights)
    assert trainer_in(tmp_path, seed=1).prepared().weights != weights
