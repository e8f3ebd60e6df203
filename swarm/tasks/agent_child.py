"""The process that plays `agent:FILE.py:FUNCTION`: the user's function, many episodes side by side on one event loop.

`async def agent(row, client)` gets a row of the data and an openai.AsyncOpenAI of its own, whose key names the episode.
It returns the reward, or rewards and figures by name. Without data, `row(number)` next to it makes the rows.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import ssl
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from swarm.confine import confine
from swarm.errors import UserError
from swarm.machine import allow_open_files, limit_memory
from swarm.process import PROGRESS_S, ChildChannel
from swarm.tasks.base import EpisodeResult
from swarm.tasks.drawn import HELD_OUT_BEGINS
from swarm.tasks.functions import load_module
from swarm.tasks.programs import POLICY, Play, ProgramBegin
from swarm.tasks.reward_child import checked_figures, one_line

EPISODE_S = 3600.0  # Of one episode: also of one that was given up, and asks again and again in vain
CALL_S = 3600.0  # For an answer: the learner itself gives up an episode that it waits for in vain
SIDE_BY_SIDE = 4096  # Calls of all episodes that may begin to connect at a time
MEMORY_BYTES = 8 << 30  # Of the process (RLIMIT_DATA), with all its episodes


class Agent:
    """The function of the file that `what` names, loaded here."""

    def __init__(self, begin: ProgramBegin, url: str) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        class Client(AsyncOpenAI):  # type: ignore[misc, unused-ignore]
            """A client with the `model` to name, and a way to reward a call before the end."""

            model = POLICY

            async def reward(self, value: float, completion: Any = None) -> None:
                """Credit the call that `completion` answered, or else the newest one."""
                body = {"reward": float(value), "id": getattr(completion, "id", None)}
                await self.post("/reward", body=body, cast_to=object)

        # Each episode has its own connections: for each call a shared pool looks through those of all episodes. Reading
        # the machine's certificates takes longest of making them, so that is done once. This machine needs no proxy.
        self._connections = partial(DefaultAsyncHttpxClient, verify=ssl.create_default_context(), trust_env=False)
        self._client = partial(Client, base_url=f"{url}/v1", timeout=CALL_S, max_retries=0)
        self._path, _, name = begin.what.rpartition(":")
        module = load_module(Path(self._path), f"the agent {begin.what}")
        self._play: Any = getattr(module, name, None)
        self._row = None if begin.has_data else getattr(module, "row", None)
        if not inspect.iscoroutinefunction(self._play):
            raise UserError(f"the agent {begin.what}: write `async def {name}(row, client)` in {self._path}")
        if not begin.has_data and self._row is None:
            raise UserError(
                f"the agent {begin.what} has no data: add @jsonl:FILE, or `def row(number)` in {self._path}"
            )

    async def play(self, call: Play) -> EpisodeResult:
        side, _, number = call.prompt_id.rpartition("-")
        first = HELD_OUT_BEGINS if side == "heldout" else 0
        async with self._client(api_key=call.key, http_client=self._connections()) as client:
            try:
                row = json.loads(call.row) if self._row is None else self._row(first + int(number))
                async with asyncio.timeout(EPISODE_S):
                    return _result(await self._play(row, client))
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - an agent may raise anything
                return EpisodeResult(fault=self._why(error))

    def _why(self, error: BaseException) -> str:
        """Return what an agent raised, and in which line of its file."""
        own, frames = Path(self._path).resolve(), traceback.extract_tb(error.__traceback__)
        lines = [one.lineno for one in frames if Path(one.filename).resolve() == own]
        at = f" ({self._path}, line {lines[-1]})" if lines else ""
        return _clean(f"it raised {one_line(error)}{at}")[:400]


def _result(found: Any) -> EpisodeResult:
    """What an agent returned. Of several figures, `reward` is the reward, or else their sum."""
    if found is None:
        raise TypeError("it returned None: return a reward")
    if not isinstance(found, Mapping):
        return EpisodeResult(reward=checked_figures({"the reward": found})["the reward"])
    parts = checked_figures({_clean(str(name)): figure for name, figure in found.items()})
    return EpisodeResult(reward=parts.pop("reward") if "reward" in parts else sum(parts.values()), parts=parts)


def _clean(text: str) -> str:
    """`text` without lone surrogates, which a frame to the learner cannot have."""
    return text.encode(errors="replace").decode()


async def _tunnel(path: str) -> str:
    """Listen on this network namespace's own loopback, and pass all to the endpoint's socket. Return the URL. OSError
    if there is no loopback."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # Either end may go first
        finally:
            writer.close()

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            out_reader, out_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, out_writer), copy(out_reader, writer))

    server = await asyncio.start_server(passed, "127.0.0.1", 0, backlog=SIDE_BY_SIDE)
    host, port = server.sockets[0].getsockname()
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    return f"http://{host}:{port}"


async def _serve(begin: ProgramBegin, channel: ChildChannel, exposed: str, *, is_apart: bool) -> None:
    try:
        with channel.alive():
            agent: Agent | UserError = Agent(begin, await _tunnel(begin.socket) if is_apart else begin.url)
    except UserError as fault:
        agent = fault  # For whoever calls
    except OSError as fault:
        words = "a network of its own without a loopback: set task_options = { network = true }"
        agent = UserError(f"this system gives the agent's process {words} ({fault})")

    async def beat() -> None:
        while True:  # On the event loop: an agent that holds it up is noticed
            channel.progress()
            await asyncio.sleep(PROGRESS_S)

    async def play(call: Play) -> EpisodeResult:
        if isinstance(agent, UserError):
            raise agent
        return await agent.play(call) if call.prompt_id else EpisodeResult(fault=exposed)

    beating = asyncio.create_task(beat())
    await channel.serve_side_by_side(Play, play)
    beating.cancel()


def main() -> None:
    begin = msgspec.json.decode(sys.argv[1], type=ProgramBegin)
    # Before a library is loaded or a thread started: neither could be taken along.
    before = _network()
    exposed = confine(begin.secrets, needs_loopback=True, name="agent", network=begin.network)
    limit_memory(MEMORY_BYTES)
    allow_open_files()
    channel = ChildChannel()
    asyncio.run(_serve(begin, channel, exposed, is_apart=_network() != before))


def _network() -> str:
    """Return which network namespace this process is in; "" where there are none."""
    return os.readlink("/proc/self/ns/net") if sys.platform == "linux" else ""


if __name__ == "__main__":
    main()
