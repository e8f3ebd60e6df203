"""When the log-probs that samplers claim are compared with the learner's for weights that it no longer has.

A step sees whether they agree if its batch was drawn by the weights that it begins with. In an asynchronous run no step
but the first is so. So staged weights are kept until a batch comes that they have drawn, and some of its rollouts are
read with them. The next weights are kept once there is time for that within COMPARED_SHARE of the time of all steps. A
replay after a crash does it at other steps, so what is found must change no weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from swarm.broadcast.store.disk import DiskFull, copy_parts
from swarm.broadcast.version.manifest import TensorSpec, trained_spans
from swarm.learner.alarms import Mismatch
from swarm.learner.checkpoint.model_files import stream_places, weights_of
from swarm.learner.messages import TrainGroup

COMPARED_SHARE = 0.01
COMPARED_ROLLOUTS = 32  # Read at a time, at most: enough for a median, and more would make comparisons rarer

Compare = Callable[[Sequence[TrainGroup], dict[str, torch.Tensor]], list[Mismatch]]


class Comparison:
    """Keeps the staged weights of one version at a time, to be read as `tensors` are."""

    def __init__(self, tensors: dict[TensorSpec, torch.Tensor], clock: Callable[[], float] = time.monotonic) -> None:
        self._tensors, self._clock = tensors, clock
        self._kept: list[torch.Tensor] = []
        self._step, self._last_s = 0, 0.0
        self.spent_s = self.trained_s = 0.0
        """Seconds of all comparisons, and of all learner steps, which the trainer counts."""

    def staged(self, staging: Path, step: int) -> None:
        """Keep the weights after `step` steps, just staged, if none are kept and there is time for a comparison as long
        as the last one."""
        if self._kept or self.spent_s + self._last_s > COMPARED_SHARE * self.trained_s:
            return
        began, self._step, self._last_s = self._clock(), step, 0.0
        # A copy, since the staging file changes places with the published one, and is staged over later.
        copy = staging.with_name("compared.bin")
        with suppress(OSError, DiskFull):  # Without room on the disk the next publication tries again
            copy_parts(staging, copy, trained_spans(tuple(self._tensors)))
            self._kept = stream_places(self._tensors, copy)
        # Its bytes stay for as long as they are mapped, and go with this process.
        copy.unlink(missing_ok=True)
        self._spend(began)

    def found(self, groups: Sequence[TrainGroup], step: int, compare: Compare) -> list[Mismatch]:
        """Return what `compare` finds in batch `step`, if the kept weights, and no others, drew half of it or more. Of
        fewer rollouts hostile samplers could more easily have most. The step itself sees what the newest drew."""
        began, age = self._clock(), step - self._step
        batch = [(group.prompt_token_ids, rollout) for group in groups for rollout in group.rollouts]
        drawn = [TrainGroup(ids, (one,)) for ids, one in batch if one.staleness == age and not one.mixed]
        if age > max(one.staleness for _, one in batch):
            self._kept = []
        if not self._kept or age == 0 or 2 * len(drawn) < len(batch):
            return []
        weights = weights_of(self._tensors, self._kept)
        self._kept = []
        found = compare(drawn[:: -(-len(drawn) // COMPARED_ROLLOUTS)], weights)
        self._spend(began)
        return found

    def _spend(self, began: float) -> None:
        self._last_s += self._clock() - began
        self.spent_s += self._clock() - began
