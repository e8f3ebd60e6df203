"""control.sock in a learner's run directory, or in the state directory of a node that joined: how its owner changes it
while it runs, from the same machine only.

One line of JSON in, one line of JSON out: {"max_staleness": 4} is answered with {"done": "..."} or {"refused": "..."}.
File permissions protect it: only the owner may open the socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

from swarm.errors import EchoError, UserError
from swarm.node.identity import default_states

SOCKET = "control.sock"
LINE_BYTES = 4096  # Longest request or answer: both are one short line

CALL_S = 10.0  # Time limit of a request at both ends: an answer does not wait for the change to take effect

PLACES = {"learner": "its run directory", "node": "its state directory with --state-dir"}

Change = Callable[[dict[str, Any]], Awaitable[str]]
"""Carries out a request and returns a line that says what was done. A UserError says why it was refused."""


@asynccontextmanager
async def control(
    directory: Path, change: Change, unable: Callable[[OSError], None] | None = None
) -> AsyncIterator[None]:
    """Take requests for as long as the block runs. Where the file system takes no sockets, raise OSError, or tell
    `unable` and take none."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                answer = await _answer(await reader.readline(), change)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ValueError, OSError):
            pass  # The caller sent nothing, sent too much, or has gone
        finally:
            writer.close()

    server = None
    try:
        with _short_path(directory) as path:
            # A killed node left it behind: this process holds the directory's lock.
            path.unlink(missing_ok=True)
            server = await asyncio.start_unix_server(serve, str(path), limit=LINE_BYTES)
            os.chmod(path, 0o600)
    except OSError as error:
        if unable is None:
            raise
        unable(error)
    try:
        yield
    finally:
        if server is not None:
            server.close()
        (directory / SOCKET).unlink(missing_ok=True)


async def ask_for(directory: Path, request: dict[str, Any], who: Literal["learner", "node"] = "learner") -> str:
    """Have the node of `directory` carry out a request, and return its line. Raise UserError if it refuses, does not
    answer, or does not run."""
    try:
        async with asyncio.timeout(CALL_S):
            with _short_path(directory) as path:
                reader, writer = await asyncio.open_unix_connection(str(path), limit=LINE_BYTES)
            writer.write(json.dumps(request).encode() + b"\n")
            answer = json.loads(await reader.readline())
            writer.close()
    except TimeoutError as error:
        raise UserError(f"the {who} of {directory} did not answer within {CALL_S:g} s: try again") from error
    except (OSError, ValueError) as error:
        raise UserError(f"no {who} runs in {directory}: name {PLACES[who]}") from error
    if "refused" in answer:
        raise UserError(str(answer["refused"]))
    return str(answer["done"])


def is_served(directory: Path) -> bool:
    """Return whether a node takes requests there: a killed one leaves its socket behind. Blocking."""
    with _short_path(directory) as path, socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def running_nodes() -> list[Path]:
    """Return the default state directories in which a node of this user runs. Blocking."""
    return [path.parent for path in sorted(default_states().glob(f"*/{SOCKET}")) if is_served(path.parent)]


async def _answer(line: bytes, change: Change) -> dict[str, str]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise UserError("a request is one JSON object")
        # It goes on if the caller gives up, or something could hold that no event tells of.
        return {"done": await asyncio.shield(change(request))}
    except (EchoError, OSError) as error:
        return {"refused": str(error)}


@contextmanager
def _short_path(directory: Path) -> Iterator[Path]:
    """Yield a short path to the socket, through a link: a socket's address holds 107 bytes, less than a path may
    have."""
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}")
    with tempfile.TemporaryDirectory(prefix="echo-node-") as place:
        link = Path(place) / "to"
        link.symlink_to(directory.absolute())
        yield link / SOCKET
