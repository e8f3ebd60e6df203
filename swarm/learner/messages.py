"""Commands to the trainer's process and its answers. Both ends are ours; weights cross through files."""

from __future__ import annotations

import msgspec

from swarm.broadcast.manifest import Layout


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Load or make the model, save its small files under `files_dir`, stage version 0 at `staging`.

    `model` is a directory, a Hugging Face id, or "tiny". `minibatches` optimiser steps are made per learner step.
    """

    model: str
    files_dir: str
    staging: str
    seed: int
    device: str
    learning_rate: float
    warmup_steps: int
    minibatches: int
    temperature: float


class Prepared(msgspec.Struct, frozen=True):
    """The model is ready."""

    layout: Layout
    parameters: int
    vocab_size: int
    context_tokens: int
    stop_token_ids: tuple[int, ...]
    device: str


class TrainRollout(msgspec.Struct, frozen=True):
    """One rollout as the trainer sees it. `staleness` is in learner steps; arrays as in types.Rollout."""

    token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    reward: float
    staleness: int


class TrainGroup(msgspec.Struct, frozen=True):
    """A prompt and its rollouts."""

    prompt_token_ids: tuple[int, ...]
    rollouts: tuple[TrainRollout, ...]


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take one learner step on these groups."""

    step: int
    groups: tuple[TrainGroup, ...]


class Trained(msgspec.Struct, frozen=True):
    """Figures of the step, by TRL's names where TRL has one, and how long it took."""

    metrics: dict[str, float]
    seconds: float


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Write the weights as bf16, in layout order, over the staging file."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a Hugging Face checkpoint to `directory`, which appears whole or not at all."""

    directory: str


class Done(msgspec.Struct, frozen=True):
    """The command was carried out."""


Command = Prepare | Train | Stage | Save
