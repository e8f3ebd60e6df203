"""The processes that share one trainer's work. One alone, until several are started under torchrun."""

from __future__ import annotations

import math
from typing import Any

import torch

from swarm.learner.batch import MicroBatch


class Ranks:
    """One rank alone."""

    rank = 0
    count = 1

    def share(self, parts: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches that this rank computes: as many on every rank, since each takes part in every pass."""
        return parts

    def add_up(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums over the tokens of this rank, added up over all."""
        return sums

    def clip_gradient(self, model: Any, limit: float) -> float:
        """Scale the gradient to a norm of at most `limit`; the norm that it had, which may not be finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
        if not math.isfinite(norm):
            # Scaled by NaN; nobody may step on it.
            return math.nan
        return norm
