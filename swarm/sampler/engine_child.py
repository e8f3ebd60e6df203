"""The engine's process: `python -m swarm.sampler.engine_child`, started by the worker."""

from __future__ import annotations

import msgspec

from swarm.child import ChildChannel
from swarm.sampler.engine import Command, Engine, Generate, Install, Start


def main() -> None:
    # Connected before the libraries are loaded: the node need not wait for them to know that we run.
    channel = ChildChannel()
    from swarm.sampler.transformers_engine import TransformersEngine

    serve(TransformersEngine(), channel)


def serve(engine: Engine, channel: ChildChannel) -> None:
    """Answer the node's commands with `engine` until the node goes."""

    def handle(command: Command) -> msgspec.Struct:
        match command:
            case Start():
                return engine.start(command)
            case Install():
                return engine.install(command, channel.progress)
            case Generate():
                return engine.generate(command, channel.progress)

    channel.serve(Command, handle)


if __name__ == "__main__":
    main()
