"""Nodes as processes of this machine: started, found and stopped by the command that shows them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from swarm.broadcast.store.place import sweep
from swarm.errors import EchoError
from swarm.run.directory import ADDRESS

START_S = 60.0
STOP_S = 20.0  # Before a node that was asked to stop is killed: a sampler takes 10 s to drain, 6 to hand over


async def start_node(
    log: Path, *arguments: str, module: str = "swarm", environment: Mapping[str, str] = MappingProxyType({})
) -> asyncio.subprocess.Process:
    """Start `python -m MODULE ARGUMENTS`, which ends when this process does, with more variables in its environment.
    What it prints goes to `log`."""
    # For its owner alone: a learner prints its page's address with the token.
    await asyncio.to_thread(log.touch, mode=0o600)
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments, "--stop-with-stdin"),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            # Several engines share the cores; more threads each would only wait for one another.
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )


async def learner_url(run_dir: Path, learner: asyncio.subprocess.Process, log: Path) -> str:
    """Wait until the learner listens, and return where. Raise EchoError if it does not."""
    path = run_dir / ADDRESS
    until = time.monotonic() + START_S
    while not path.exists():
        if learner.returncode is not None or time.monotonic() > until:
            raise EchoError(f"the learner did not start: {last_words(log)}")
        await asyncio.sleep(0.05)
    return str(json.loads(path.read_text())["url"])


async def stop_nodes(nodes: Sequence[asyncio.subprocess.Process]) -> None:
    """Ask every node to end, and kill it after STOP_S."""
    for process in nodes:
        if process.returncode is None:
            process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await asyncio.gather(*(process.wait() for process in nodes))
    except (TimeoutError, asyncio.CancelledError):
        for process in nodes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in nodes))
    await asyncio.to_thread(sweep)  # Those that were killed left their weights in memory


def printed(log: Path) -> list[str]:
    """Return the lines that a node has printed."""
    return log.read_text(errors="replace").strip().splitlines()


def last_words(log: Path) -> str:
    return f"{' | '.join(printed(log)[-2:]) or 'it said nothing'} (log: {log})"
