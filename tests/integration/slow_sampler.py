"""`python -m tests.integration.slow_sampler MODULE ...`: run MODULE, such as swarm, whose sampler takes STEP_S for each
token of a batch, so that a signal finds samples under way. Run without arguments it is that engine's child."""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

from swarm.join import spot
from swarm.process import Child
from swarm.sampler import engine_child, transformers, worker

STEP_S = 0.05
METADATA = "ECHO_TEST_METADATA"  # Names a variable: the address of a cloud's service of the test's own
MODULE = "tests.integration.slow_sampler"
KINDS = ("transformers",)


class SlowDraw(transformers.SeededDraw):
    def drawn(self, scores: Any, rows: Any) -> Any:
        time.sleep(STEP_S)
        return super().drawn(scores, rows)


if __name__ == "__main__":
    if sys.argv[1] in KINDS:
        transformers.SeededDraw = SlowDraw  # type: ignore[misc]
        engine_child.main()
    else:
        spot.METADATA = os.environ[METADATA]
        worker.Child = lambda name, module, *given, **named: Child(name, MODULE, *given, **named)  # type: ignore
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
