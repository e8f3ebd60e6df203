"""Closed forms of docs/capacity.md for equal lengths, with names of the model: what predictions are held against."""

from __future__ import annotations

import math

from swarm.capacity.model import fresh_every_steps, slack_s


def mu_min_pausing(
    *, rollouts_per_step: int, publish_every_steps: int, train_step_s: float, broadcast_s: float
) -> float:
    """kappa R / (kappa T - T_b): the least rate where samplers stand still to fetch (ECHO-2's rule); inf if none is."""
    left_s = publish_every_steps * train_step_s - broadcast_s
    return publish_every_steps * rollouts_per_step / left_s if left_s > 0 else math.inf


def mu_necessary(
    *,
    rollouts_per_step: int,
    publish_every_steps: int,
    max_staleness: int,
    train_step_s: float,
    broadcast_s: float,
) -> float:
    """R / min(T, (S + 1 - kappa) T - T_b): at less the learner waits for batches of mean length; inf if at any rate."""
    left_s = slack_s(
        publish_every_steps=publish_every_steps,
        max_staleness=max_staleness,
        train_step_s=train_step_s,
        latency_s=broadcast_s,
    )
    return rollouts_per_step / min(train_step_s, left_s) if left_s > 0 else math.inf


def mu_sufficient(
    *,
    rollouts_per_step: int,
    publish_every_steps: int,
    max_staleness: int,
    train_step_s: float,
    broadcast_s: float,
    generation_s: float,
) -> float:
    """R / min(T, (S + 1 - kappa) T - (T_b + T_gen)): a rate that is enough for equal lengths; inf if none is."""
    return mu_necessary(
        rollouts_per_step=rollouts_per_step,
        publish_every_steps=publish_every_steps,
        max_staleness=max_staleness,
        train_step_s=train_step_s,
        broadcast_s=broadcast_s + generation_s,
    )


def min_step_s(
    *,
    rollouts_per_step: int,
    publish_every_steps: int,
    max_staleness: int,
    train_step_s: float,
    broadcast_s: float,
    batch_s: float,
    rollouts_per_s: float,
) -> float:
    """The mean step where all lengths are equal: max(T, R / mu, (T + T_b + batch_s + (c kappa - m) T) / (c kappa)),
    m = S + 2 - kappa, c = ceil(m / kappa); for kappa = 1 the last is (T + T_b + batch_s) / (S + 1).

    `batch_s` is what places that are free take for R rollouts: ceil(R / places) times a place's time. Never less, and
    just this where places are enough that those which go on with older groups keep none from a new version.
    """
    steps = fresh_every_steps(publish_every_steps=publish_every_steps, max_staleness=max_staleness)
    bound_steps = max_staleness + 2 - publish_every_steps
    fresh_s = train_step_s + broadcast_s + batch_s + (steps - bound_steps) * train_step_s
    return max(train_step_s, rollouts_per_step / rollouts_per_s, fresh_s / steps)
