"""The engine's process: `python -m swarm.sampler.engine_child KIND`, started by the worker."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import msgspec

from swarm.process import ChildChannel
from swarm.sampler.engine import Command, Engine, Generate, Install, Start


def main() -> None:
    # Connect before loading the libraries, so that the node soon knows that we run.
    channel = ChildChannel()
    serve(_make(sys.argv[1]), channel)


def _make(kind: str) -> Callable[[], Engine]:
    match kind:
        case "transformers":
            from swarm.sampler.transformers import Threaded, TransformersEngine

            return lambda: Threaded(TransformersEngine())
        case "vllm":
            from swarm.sampler.vllm.engine import VllmEngine

            return VllmEngine
        case "scripted":
            from swarm.sampler.scripted_engine import ScriptedEngine

            return ScriptedEngine
    raise ValueError(f"no engine is called {kind}")


def serve(make: Callable[[], Engine], channel: ChildChannel) -> None:
    """Answer the node's commands with the engine that `make` builds, until the node goes."""

    async def run() -> None:
        engine = make()

        async def handle(command: Command) -> msgspec.Struct:
            match command:
                case Start():
                    return await engine.start(command, channel.progress)
                case Install():
                    return await engine.install(command, channel.progress)
                case Generate():
                    return await engine.generate(command, channel.progress)

        await channel.serve_side_by_side(Command, handle)

    asyncio.run(run())


if __name__ == "__main__":
    main()
