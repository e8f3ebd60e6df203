"""`python -m tests.scripted MODULE ...`: run MODULE, such as swarm, whose sampler draws with tests/scripted_engine.py.

Its TOML says `engine = "vllm"`, of whatever machine: only that engine has arguments (`engine_arguments`).
"""

from __future__ import annotations

import runpy
import sys

from swarm.join import sampler
from swarm.process import Child
from swarm.sampler import worker
from swarm.sampler.choice import ChosenEngine
from tests.scripted_engine import ENGINE

if __name__ == "__main__":
    worker.Child = lambda name, module, *given, **named: Child(name, ENGINE, *given, **named)  # type: ignore
    sampler.choose_engine = lambda *_: ChosenEngine(kind="transformers", why="scripted")  # type: ignore
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
