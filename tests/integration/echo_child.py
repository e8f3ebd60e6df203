"""A child process for tests: `python -m tests.integration.echo_child` answers with what it is sent."""

from __future__ import annotations

import msgspec

from swarm.child import ChildChannel
from swarm.errors import UserError


class Echo(msgspec.Struct, frozen=True, tag=True):
    """Say `words`; `fault` raises them instead, `hang` never answers."""

    words: str
    fault: str = ""
    hang: bool = False


class Said(msgspec.Struct, frozen=True):
    words: str


def handle(command: Echo) -> Said:
    if command.fault == "user":
        raise UserError(command.words)
    if command.fault:
        raise RuntimeError(command.words)
    while command.hang:
        pass
    return Said(command.words)


if __name__ == "__main__":
    ChildChannel().serve(Echo, handle)
