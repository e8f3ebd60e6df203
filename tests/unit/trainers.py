"""A trainer in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from swarm.learner.messages import Save, Saved, TrainerConfig, TrainGroup, TrainRollout
from swarm.learner.trainer import Trainer
from swarm.process import NoParent
from tests.builders import floats, ints


def trainer_config(directory: Path, *configs: TrainerConfig | None, **settings: Any) -> TrainerConfig:
    """What `configs` set and `settings`, of a tiny model that learns at once."""
    given: dict[str, Any] = {"learning_rate": 1e-3, "warmup_steps": 1, "device": "cpu"}
    for config in configs:
        given |= config.model_dump(exclude_unset=True) if config is not None else {}
    # Unchecked: tests cut micro-batches smaller than a user may.
    return TrainerConfig.model_construct(**{**given, "run_dir": directory, **settings})


def trainer_in(
    directory: Path,
    *,
    learning: TrainerConfig | None = None,
    compute: TrainerConfig | None = None,
    resume: Path | None = None,
    **settings: Any,
) -> Trainer:
    config = trainer_config(directory, learning, compute, **settings)
    return Trainer(config, NoParent(), resume=str(resume) if resume else "")


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
