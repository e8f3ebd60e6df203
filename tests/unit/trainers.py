"""A trainer in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from swarm.learner.messages import Save, Saved, TrainerConfig, TrainGroup, TrainRollout
from swarm.learner.trainer import Trainer
from swarm.process import NoParent
from tests.builders import floats, ints


def trainer_in(directory: Path, *, resume: Path | None = None, **settings: Any) -> Trainer:
    """A trainer of a tiny model that learns at once."""
    given = {"learning_rate": 1e-3, "warmup_steps": 1, "device": "cpu", "run_dir": directory, **settings}
    # Unchecked: tests cut micro-batches smaller than a user may.
    return Trainer(TrainerConfig.model_construct(**given), NoParent(), resume=str(resume) if resume else "")


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer._model.parameters()])


def saved(trainer: Trainer, directory: Path, step: int) -> Path:
    """A checkpoint of `trainer` that is on the disk."""
    trainer.save(Save(directory=str(directory), step=step))
    assert trainer.flush() == Saved(step=step, fault="")
    return directory


def group(rewards: list[float], *, logprob: float = -2.6) -> TrainGroup:
    """A prompt with one rollout for each reward; no two have the same tokens."""
    claimed = floats(logprob, logprob)
    rollouts = tuple(
        TrainRollout(token_ids=ints(3 + i, 2), logprobs=claimed, reward=reward, staleness=0)
        for i, reward in enumerate(rewards)
    )
    return TrainGroup(prompt_token_ids=(1, 4, 13), rollouts=rollouts)
