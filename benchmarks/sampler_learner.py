"""A learner's step on a random model, by the trainer's own process: `python -m benchmarks.sampler_learner DTYPE`.

With bfloat16 the trainer's products run under autocast, its weights and moments stay float32; with float32 it is the
trainer as the learner node starts it. A step is one optimiser step on a batch of full-length rollouts.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.sampler_models import parameters_of
from benchmarks.sampler_process import HANG_S
from swarm.learner import trainer
from swarm.learner.messages import (
    Done,
    Prepare,
    Prepared,
    Stage,
    Train,
    Trained,
    TrainerConfig,
    TrainGroup,
    TrainRollout,
)
from swarm.learner.tiny import tiny_tokenizer
from swarm.models.device import pick_device
from swarm.process import Child

LEARNING_RATE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Median seconds of a step on so many tokens, prompts included, and of staging the weights as bf16."""

    dtype: str
    parameters: int
    rollouts: int
    tokens: int
    step_s: float


async def learner_steps(
    directory: Path, model: Any, *, dtype: str, device: str, groups: int, completion_tokens: int, steps: int
) -> Steps:
    """Time `steps` steps on groups of 8 rollouts, after one that is not counted."""
    await asyncio.to_thread(_save, model, directory)
    config = TrainerConfig(
        model=str(directory / "given"),
        run_dir=directory,
        task="copy",
        device=device,
        learning_rate=LEARNING_RATE,
        warmup_steps=0,
        minibatches=1,
    )
    batch = _groups(groups, completion_tokens, model.config.vocab_size)
    child = Child("trainer", "benchmarks.sampler_learner", dtype, log=directory / "trainer.log", hang_s=HANG_S)
    try:
        await child.start()
        await child.call(Prepare(config=config.model_dump(mode="json")), Prepared)
        seconds = [(await child.call(Train(step=n, groups=batch), Trained)).seconds for n in range(steps + 1)]
        await child.call(Stage(), Done)
    finally:
        await child.stop()
    rollouts = [rollout for group in batch for rollout in group.rollouts]
    return Steps(
        dtype=dtype,
        parameters=parameters_of(model),
        rollouts=len(rollouts),
        tokens=sum(len(group.prompt_token_ids) + completion_tokens for group in batch for _ in group.rollouts),
        step_s=statistics.median(seconds[1:]),
    )


def line(one: Steps) -> str:
    """What a person is told of it."""
    return (
        f"learner's step in {one.dtype}, {one.parameters / 1e6:.1f} M parameters, {one.rollouts} rollouts, "
        f"{one.tokens} tokens: {one.step_s:.2f} s"
    )


def _save(model: Any, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory / "given")
    tiny_tokenizer().save_pretrained(directory / "given")


def _groups(count: int, completion_tokens: int, vocab_size: int) -> tuple[TrainGroup, ...]:
    random = Random(0)

    def tokens(number: int) -> Sequence[int]:
        return [random.randrange(vocab_size) for _ in range(number)]

    return tuple(
        TrainGroup(
            prompt_token_ids=tuple(tokens(64)),
            rollouts=tuple(
                TrainRollout(
                    token_ids=array("i", tokens(completion_tokens)).tobytes(),
                    logprobs=array("f", [-11.0] * completion_tokens).tobytes(),
                    reward=float(n % 2),
                    staleness=0,
                )
                for n in range(8)
            ),
        )
        for _ in range(count)
    )


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    kind = pick_device("auto").type
    with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
        trainer.main()


if __name__ == "__main__":
    main()
