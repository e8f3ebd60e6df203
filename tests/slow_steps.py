"""`python -m tests.slow_steps STEP_S NOISE lead ...`: a learner whose steps take STEP_S, as those of a large model do.

NOISE is the largest share by which that varies from step to step. TRAINER_HANG_S in the environment: a trainer without
progress for so long is restarted.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from random import Random
from typing import Any

from msgspec.structs import replace

from swarm.__main__ import main
from swarm.learner.messages import Trained
from swarm.learner.process import TrainerProcess

_train = TrainerProcess.train


def slowed(step_s: float, noise: float) -> Any:
    """Return a `train` that takes at least so long."""

    async def train(trainer: TrainerProcess, step: int, *given: Any) -> Trained:
        began = time.monotonic()
        trained = await _train(trainer, step, *given)
        await asyncio.sleep(began + step_s * (1 + noise * Random(step).uniform(-1, 1)) - time.monotonic())
        return replace(trained, seconds=time.monotonic() - began)

    return train


if __name__ == "__main__":
    if hang_s := os.environ.get("TRAINER_HANG_S"):
        TrainerProcess.__init__.__kwdefaults__["hang_s"] = float(hang_s)  # type: ignore[index]
    TrainerProcess.train = slowed(float(sys.argv.pop(1)), float(sys.argv.pop(1)))  # type: ignore[method-assign]
    main()
