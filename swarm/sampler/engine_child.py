"""The engine's process: `python -m swarm.sampler.engine_child KIND`, started by the worker."""

from __future__ import annotations

import asyncio
import sys

import msgspec
from msgspec.structs import replace

from swarm.confine import STACKS_BYTES, confine, has_gpu
from swarm.machine import free_host_bytes, limit_memory
from swarm.process import ChildChannel
from swarm.sampler.engine import Command, Engine, Generate, GiveUp, Install, Reckon, Start
from swarm.sampler.room import reckon


def main() -> None:
    kind, *secrets = sys.argv[1:]
    # Before a library is loaded or a thread started: neither could be taken along.
    exposed = confine(secrets, needs_loopback=kind == "vllm")
    # Connect before loading the libraries, so that the node soon knows that we run.
    channel = ChildChannel()
    serve(make_engine(kind), channel, exposed)


def make_engine(kind: str) -> Engine:
    """Return an engine of this kind, which loads its libraries."""
    match kind:
        case "transformers":
            from swarm.sampler.transformers import Threaded, TransformersEngine

            return Threaded(TransformersEngine())
        case "vllm":
            from swarm.sampler.vllm.engine import VllmEngine

            return VllmEngine()
        case "mlx":
            from swarm.sampler.mlx.engine import MlxEngine
            from swarm.sampler.transformers import Threaded

            return Threaded(MlxEngine())
    raise ValueError(f"no engine is called {kind}")


def serve(engine: Engine, channel: ChildChannel, exposed: str = "") -> None:
    """Answer the node's commands with `engine`, until the node goes."""

    async def handle(command: Command) -> msgspec.Struct:
        match command:
            case Reckon():
                return await asyncio.to_thread(reckon, command.kind, command.layout, command.options)
            case Start():
                _limit_memory(command.options.device)
                return replace(await engine.start(command, channel.progress), exposed=exposed)
            case Install():
                return await engine.install(command, channel.progress)
            case GiveUp():
                engine.give_up()
                return command
            case Generate():
                return await engine.generate(command, channel.progress)

    asyncio.run(channel.serve_side_by_side(Command, handle))


def _limit_memory(device: str) -> None:
    """Have an engine on the CPU fail before this machine runs out of memory. A GPU's driver maps what it never takes,
    so there the model's own check has to do."""
    if device == "cpu" or not has_gpu():
        limit_memory(free_host_bytes() + STACKS_BYTES)


if __name__ == "__main__":
    main()
