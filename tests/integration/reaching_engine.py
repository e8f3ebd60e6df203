"""The transformers engine in a process like any other's, which writes down what it can reach when it is started."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from swarm.sampler import engine_child, transformers
from swarm.sampler.engine import Start, Started, Told

PORT, SECRET, TOLD = "ECHO_TEST_PORT", "ECHO_TEST_SECRET_PATH", "ECHO_TEST_TOLD"


def tried(action: Callable[[], object]) -> str:
    try:
        return str(action())
    except OSError as error:
        return type(error).__name__


def _memory_of_the_node() -> int:
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        return memory.fileno()


def _own_loopback() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
        return "reached"


class Reaching(transformers.TransformersEngine):
    def start(self, command: Start, progress: Told) -> Started:
        told = {
            "network": tried(lambda: socket.create_connection(("127.0.0.1", int(os.environ[PORT])), 5.0)),
            "loopback": tried(_own_loopback),
            "key": tried(lambda: Path(os.environ[SECRET]).read_text()),
            "memory": tried(_memory_of_the_node),
            "variables": sorted(os.environ),
            "descriptors": [tried(partial(os.readlink, f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd")],
            "limit": _limit(),
            "rights": _rights(),
        }
        Path(os.environ[TOLD]).write_text(json.dumps(told))
        return super().start(command, progress)


def _rights() -> list[str]:
    """Its capabilities, and whether it has renounced all others."""
    return re.findall(r"^(?:CapPrm|NoNewPrivs):\s+(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)


def _limit() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)[0]


if __name__ == "__main__":
    transformers.TransformersEngine = Reaching  # type: ignore[misc]
    engine_child.main()
