"""When the log-probs that samplers claim are compared with the learner's for weights that it no longer has.

A step sees whether they agree if its batch was drawn by the weights that it begins with. In an asynchronous run no step
but the first is so. So staged weights are kept until a batch comes that they have drawn, and some of its rollouts are
read with them. The next weights are kept once all this has taken less than COMPARED_SHARE of the time of the steps. A
replay after a crash does it at other steps, so what is found must change no weight.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from swarm.broadcast.version.manifest import TensorSpec
from swarm.learner.alarms import Mismatch
from swarm.learner.checkpoint.model_files import stream_places
from swarm.learner.messages import TrainGroup

COMPARED_SHARE = 0.01
COMPARED_ROLLOUTS = 32  # Read at a time, at most: enough for a median, and more would make comparisons rarer

Compare = Callable[[Sequence[TrainGroup], dict[str, torch.Tensor]], list[Mismatch]]


class Comparison:
    """Keeps the staged weights of one version at a time, those of `tensors`. `path` is a name for the copy."""

    def __init__(
        self, tensors: dict[TensorSpec, torch.Tensor], path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tensors = tensors
        self._path = path
        self._clock = clock
        self._step = 0
        self._kept: list[torch.Tensor] = []
        self._last_s = 0.0
        self.spent_s = self.trained_s = 0.0
        """Seconds of all comparisons, and of all learner steps, which the trainer counts."""

    def staged(self, staging: Path, step: int, *, is_urgent: bool) -> None:
        """Keep the weights after `step` steps, just staged, if none are kept and there is time for as long a comparison
        as the last one, or if it `is_urgent`."""
        is_due = self.spent_s + self._last_s <= COMPARED_SHARE * self.trained_s or is_urgent
        if self._kept or not is_due:
            return
        self._step, self._last_s = step, 0.0
        # Without room on the disk the next publication tries again.
        with self._timed(), suppress(OSError):
            # A copy, since the staging file changes places with the published one, and is staged over later.
            shutil.copyfile(staging, self._path)
            self._kept = stream_places(self._tensors, self._path)
        # Its bytes stay for as long as they are mapped, and go with this process.
        self._path.unlink(missing_ok=True)

    def found(self, groups: Sequence[TrainGroup], step: int, compare: Compare) -> list[Mismatch]:
        """Return what `compare` finds in batch `step`, if the kept weights, and no others, drew half of it or more. Of
        fewer rollouts hostile samplers could more easily have most. The step itself sees what the newest drew."""
        batch = [(group.prompt_token_ids, rollout) for group in groups for rollout in group.rollouts]
        age = step - self._step
        drawn = [TrainGroup(ids, (one,)) for ids, one in batch if one.staleness == age and not one.mixed]
        if self._kept and age > max(one.staleness for _, one in batch):
            self._kept = []
        if not self._kept or age == 0 or 2 * len(drawn) < len(batch):
            return []
        with self._timed():
            pairs = zip(self._tensors.items(), self._kept, strict=True)
            weights = {f"model.{spec.name}": kept.to(own.device).to(own.dtype) for (spec, own), kept in pairs}
            self._kept = []
            return compare(drawn[:: -(-len(drawn) // COMPARED_ROLLOUTS)], weights)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._clock()
        yield
        spent_s = self._clock() - began
        self._last_s += spent_s
        self.spent_s += spent_s
