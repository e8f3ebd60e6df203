"""A child process for tests: `python -m tests.integration.echo_child` answers with what it is sent."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict

import msgspec

from swarm.errors import UserError
from swarm.process import ChildChannel


class Echo(msgspec.Struct, frozen=True, tag=True):
    """Say `words`; `fault` raises them instead, `hang` never answers, `after` waits for those words to be said."""

    words: str
    fault: str = ""
    hang: bool = False
    after: str = ""


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


async def main() -> None:
    said: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def handle_beside(command: Echo) -> Said:
        if command.after:
            await said[command.after].wait()
        said[command.words].set()
        return handle(command)

    await ChildChannel().serve_side_by_side(Echo, handle_beside)


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(main())
    ChildChannel().serve(Echo, handle)
