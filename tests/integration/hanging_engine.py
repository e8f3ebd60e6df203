"""A scripted engine that hangs in the call that ECHO_TEST_HANGS_IN names."""

from __future__ import annotations

import os
import threading

from swarm.process import ChildChannel
from swarm.sampler.engine import Generate, Generated, Install, Installed, NotInstalled, Start, Started, Told
from swarm.sampler.engine_child import serve
from tests.scripted_engine import ScriptedEngine

VARIABLE = "ECHO_TEST_HANGS_IN"
EXPOSED = "ECHO_TEST_EXPOSED"  # What it says of its process


def _hang_in(call: str) -> None:
    if os.environ[VARIABLE] == call:
        threading.Event().wait()


class HangingEngine(ScriptedEngine):
    async def start(self, command: Start, progress: Told) -> Started:
        _hang_in("start")
        return await super().start(command, progress)

    async def install(self, command: Install, progress: Told) -> Installed | NotInstalled:
        progress()
        _hang_in("install")
        return await super().install(command, progress)

    async def generate(self, command: Generate, progress: Told) -> Generated:
        progress()
        _hang_in("generate")
        return await super().generate(command, progress)


if __name__ == "__main__":
    serve(HangingEngine(), ChildChannel(), os.environ.get(EXPOSED, ""))
