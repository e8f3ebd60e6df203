"""A scripted engine that hangs in the call that ECHO_TEST_HANGS_IN names."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from swarm.child import ChildChannel
from swarm.sampler.engine import Generate, Generated, Install, Installed, Start, Started
from swarm.sampler.engine_child import serve
from swarm.sampler.scripted_engine import ScriptedEngine

VARIABLE = "ECHO_TEST_HANGS_IN"


def _hang_in(call: str) -> None:
    if os.environ[VARIABLE] == call:
        threading.Event().wait()


class HangingEngine(ScriptedEngine):
    def start(self, command: Start) -> Started:
        _hang_in("start")
        return super().start(command)

    def install(self, command: Install, progress: Callable[[], None]) -> Installed:
        progress()
        _hang_in("install")
        return super().install(command, progress)

    def generate(self, command: Generate, progress: Callable[[], None]) -> Generated:
        progress()
        _hang_in("generate")
        return super().generate(command, progress)


if __name__ == "__main__":
    serve(HangingEngine(), ChildChannel())
