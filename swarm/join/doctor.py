"""What `doctor` looks at: this machine, and the swarm, which it calls as `join` does. It keeps and changes nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from random import SystemRandom

import aiohttp

from swarm.broadcast.store.disk import file_bytes, free_bytes
from swarm.broadcast.store.place import MEMORY
from swarm.broadcast.version.manifest import MAX_REGION_BYTES
from swarm.confine import has_gpu
from swarm.errors import EchoError, PeerUnreachable, ProtocolError
from swarm.extras import missing
from swarm.join import findings
from swarm.join.findings import Check
from swarm.join.joining import MEMORY_SHARE, SWARMS
from swarm.join.sampler import CPU_MEMORY_SHARE
from swarm.machine import free_host_bytes
from swarm.net.client import Busy, OtherCertificate, OtherEncryption, OtherProtocol, PeerClient
from swarm.node.bootstrap import Bootstraps, Greeting, OtherSwarm, clock_fault, read_bootstraps
from swarm.node.hello import open_card
from swarm.node.identity import default_states
from swarm.sampler.choice import Gpu, choose_engine, find_gpu
from swarm.types import Role

CUDA_S = 60.0  # Longest wait for torch to look at the GPU: an import, and a driver that wakes up
STATUS_BYTES = 4 << 20
PIECES = 16  # Regions that are asked for: a stranger may ask 40 times at once
PIECES_BYTES, PIECES_S = 8 << 20, 5.0  # After so much no more is asked for; a newcomer fetches that much anyway
PIECE_S = 20.0  # Longest wait for one: 4 MiB at 1.7 Mbit/s
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


async def examine(bootstraps: Sequence[str], role: Role, state_dir: Path | None) -> list[Check]:
    """Return all checks, in the order in which a person would go through them, within three minutes. Raise UserError if
    a bootstrap is invalid."""
    read_bootstraps(bootstraps)
    called = await asyncio.gather(*map(_greet, bootstraps))
    found = next((greeting for _, greeting in called if greeting is not None), None)
    card = open_card(found.hello.card, found.hello.learner_key) if found else None
    weights = card.weights_bytes if card else 0
    checks = await asyncio.to_thread(lambda: [*_machine(role, (state_dir or default_states()).absolute(), weights)])
    checks += [check for check, _ in called]
    checks += [] if found is None else [findings.clock(clock_fault(found, time.time()))]
    proxies = [name for name, value in os.environ.items() if name.lower() in PROXIES and value]
    checks += findings.proxy(proxies, cut_off=bool(bootstraps) and found is None)
    return checks if found is None else [*checks, *[check async for check in _line(found, weights)]]


def _machine(role: Role, directory: Path, weights: int) -> Iterator[Check]:
    """Yield the checks of this machine alone. Blocking."""
    yield findings.python(platform.python_version(), 8 * struct.calcsize("P"))
    draws, sees_gpu = role == "sampler", None
    if draws:
        lacks = missing("sampler")
        sees_gpu = _torch_sees_gpu() if not lacks and isinstance(find_gpu(), Gpu) else None
        version = "" if lacks else metadata.version("torch")
        yield from findings.torch(version, lacks, choose_engine("auto").line, sees_gpu=sees_gpu)
    free, shared = free_host_bytes(), free_bytes(MEMORY) if MEMORY.is_dir() else 0
    # An engine on a CPU holds the weights in float32: twice their bytes.
    yield findings.memory(free, 2 * weights if draws and not sees_gpu else 0)
    yield from findings.wear(weights, free, shared, CPU_MEMORY_SHARE if draws and not has_gpu() else MEMORY_SHARE)
    yield findings.state(str(directory), _error_in(directory))
    yield findings.disk(str(directory), free_bytes(_nearest(directory)) + _weights_in(directory), weights)
    yield from findings.sockets(tempfile.gettempdir())
    yield findings.files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _torch_sees_gpu() -> bool:
    program = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    try:
        return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=CUDA_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _nearest(directory: Path) -> Path:
    """Return the directory itself, or what is there of the way to it."""
    return next(place for place in (directory, *directory.parents) if os.path.lexists(place))


def _weights_in(directory: Path) -> int:
    """Return the bytes of weights that nodes keep there already."""
    return sum(file_bytes(path) for path in directory.rglob("*") if SWARMS in path.parts)


def _error_in(directory: Path) -> int:
    """Return the number of the error that a node would meet in its state directory, or 0."""
    try:
        with tempfile.TemporaryFile(dir=_nearest(directory)) as file:
            file.write(bytes(4096))
        for name in ("node.key", "tls.pem", "generation"):
            if (path := directory / name).exists():
                path.read_bytes()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


# -- the swarm ---------------------------------------------------------------------------------------------------------


async def _greet(text: str) -> tuple[Check, Greeting | None]:
    try:
        # This one alone, without peers that were remembered.
        found = await Bootstraps([text], Path(os.devnull), random=SystemRandom()).greet()
    except (PeerUnreachable, ProtocolError, OtherSwarm) as error:
        return Check(about="swarm", what=str(error), fix=_fix_of(error)), None
    return Check(about="swarm", what=f"{found.address.url} answers for swarm {found.hello.swarm}"), found


def _fix_of(error: BaseException) -> str:
    """Return what to do about a call that failed: by its kind, or by that of the error behind it."""
    match error:
        case OtherProtocol():
            return "update the side that it names: git pull, then bin/setup"
        case OtherSwarm() | OtherCertificate():
            return "ask the person who leads the swarm for its new join line"
        case OtherEncryption():
            return "ask for the right port; a node that does not encrypt is named http://HOST:PORT, at home alone"
        case Busy():
            return "it has no room now: try again in a minute"
        case ProtocolError() | ConnectionResetError() | aiohttp.ServerDisconnectedError():
            return "another program has that port: ask the person who leads the swarm for the right one"
        case socket.gaierror() | aiohttp.ClientConnectorDNSError():
            return "correct the name; if no other name resolves either, set this machine's DNS (/etc/resolv.conf)"
        case TimeoutError():
            return "have the learner's firewall or router let that port through; this side needs no open port"
        case OSError(errno=errno.ECONNREFUSED):
            return "ask the person who leads the swarm whether the learner runs, and on which port"
        case OSError():
            return "correct the address, or connect this machine to the network (ip route shows it)"
        case EchoError(__cause__=BaseException() as cause):
            return _fix_of(cause)
    return "ask the person who leads the swarm whether the learner runs"


async def _line(found: Greeting, weights: int) -> AsyncIterator[Check]:
    """Fetch a few regions of the newest version, as a newcomer does, if that node has one."""
    got, is_slow = 0, False
    async with PeerClient(found.address) as peer:
        began = time.monotonic()
        try:
            status = json.loads(await peer.get("/v1/status", cap_bytes=STATUS_BYTES, timeout_s=PIECE_S))
            began = time.monotonic()
            for number in range(PIECES if status["newest"] else 0):
                path = f"/v1/versions/{status['newest']}/regions/{number}"
                got += len(await peer.get(path, cap_bytes=2 * MAX_REGION_BYTES, timeout_s=PIECE_S))
                if got > PIECES_BYTES or time.monotonic() - began > PIECES_S:
                    break
        except PeerUnreachable:
            is_slow = True
        except (ProtocolError, ValueError, KeyError, TypeError, RecursionError):
            pass  # It has no more of them, or none, or answers with nonsense
        if got or is_slow:
            yield findings.line(got, time.monotonic() - began, weights)
