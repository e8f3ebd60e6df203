"""A trainer in the test's own process."""

from __future__ import annotations

from pathlib import Path

from swarm.learner.messages import AdapterRules, ComputeRules, LearningRules, Prepare, TrainGroup, TrainRollout
from swarm.learner.trainer import Trainer
from swarm.process import NoParent
from swarm.types import Schedule
from tests.builders import floats, ints


def trainer_in(
    directory: Path,
    *,
    learning_rate: float = 1e-3,
    minibatches: int = 2,
    model: str = "tiny",
    seed: int = 0,
    resume: Path | None = None,
    schedule: Schedule = "constant",
    steps: int = 0,
    learning: LearningRules | None = None,
    compute: ComputeRules | None = None,
    device: str = "cpu",
    adapter: AdapterRules | None = None,
) -> Trainer:
    command = Prepare(
        model=model,
        files_dir=str(directory / "model"),
        staging=str(directory / "staging.bin"),
        seed=seed,
        device=device,
        learning_rate=learning_rate,
        warmup_steps=1,
        schedule=schedule,
        steps=steps,
        minibatches=minibatches,
        temperature=1.0,
        learning=learning or LearningRules(),
        compute=compute or ComputeRules(),
        resume=str(resume) if resume else "",
        adapter=adapter,
    )
    return Trainer(command, NoParent())


def group(rewards: list[float], *, logprob: float = -2.6) -> TrainGroup:
    """A prompt with one rollout for each reward; no two have the same tokens."""
    rollouts = tuple(
        TrainRollout(
            token_ids=ints(3 + i, 2),
            logprobs=floats(logprob, logprob),
            reward=reward,
            staleness=0,
        )
        for i, reward in enumerate(rewards)
    )
    return TrainGroup(prompt_token_ids=(1, 4, 13), rollouts=rollouts)
