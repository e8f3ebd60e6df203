"""`python -m tests.scripted MODULE ...`: run MODULE, such as swarm, whose sampler draws with tests/scripted_engine.py.

Its TOML says `engine = "vllm"`, of whatever machine: only that engine has arguments (`engine_arguments`).
ENGINE_HANG_S in the environment: an engine without progress for so long is restarted.
"""

from __future__ import annotations

import os
import runpy
import sys

from swarm.join import sampler
from swarm.process import Child
from swarm.sampler import worker
from swarm.sampler.choice import ChosenEngine
from tests.scripted_engine import ENGINE

if __name__ == "__main__":
    hang_s = {"hang_s": float(given)} if (given := os.environ.get("ENGINE_HANG_S")) else {}
    worker.Child = lambda name, module, *given, **named: Child(name, ENGINE, *given, **named | hang_s)  # type: ignore
    sampler.choose_engine = lambda *_: ChosenEngine(kind="transformers", why="scripted")  # type: ignore
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
