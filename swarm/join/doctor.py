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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from random import SystemRandom

import aiohttp

from swarm.broadcast.store.disk import SPARE_BYTES, file_bytes, free_bytes
from swarm.broadcast.store.place import MEMORY, on_disk_line
from swarm.broadcast.version.codec import FULL_RATIO
from swarm.broadcast.version.manifest import MAX_REGION_BYTES
from swarm.confine import has_gpu
from swarm.errors import EchoError, PeerUnreachable, ProtocolError
from swarm.extras import how_to_have, missing
from swarm.join.joining import MEMORY_SHARE, SWARMS
from swarm.join.sampler import CPU_MEMORY_SHARE
from swarm.machine import free_host_bytes
from swarm.net.client import Busy, OtherCertificate, OtherEncryption, OtherProtocol, PeerClient
from swarm.node.bootstrap import Bootstraps, Greeting, OtherSwarm, clock_fault, read_bootstraps
from swarm.node.hello import open_card, size
from swarm.node.identity import default_states
from swarm.sampler.choice import Gpu, choose_engine, find_gpu
from swarm.types import Role

CUDA_S = 60.0  # Longest wait for torch to look at the GPU: an import, and a driver that wakes up
STATUS_BYTES = 4 << 20
PIECES = 16  # Regions that are asked for: a stranger may ask 40 times at once
PIECES_BYTES, PIECES_S = 8 << 20, 5.0  # After so much no more is asked for; a newcomer fetches that much anyway
PIECE_S = 20.0  # Longest wait for one: 4 MiB at 1.7 Mbit/s
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
SOCKET_BYTES = 103  # Longest path of a Unix socket: macOS takes 104 bytes with the zero at the end, Linux 108
CHILD_SOCKET = "echo-node-12345678/child.sock"  # What a child's adds to the directory for temporary files
OPEN_FILES = 512  # Links, clients of 256 peers, files of weights; macOS gives 256 unless asked
PATIENT_S = 3600.0  # A first download that takes longer is worth a word
TOLD_BYTES = 1_000_000  # Fewer bytes say nothing about a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    about: str
    what: str
    fix: str = ""


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
    checks += [] if found is None else [check_clock(clock_fault(found, time.time()))]
    proxies = [name for name, value in os.environ.items() if name.lower() in PROXIES and value]
    checks += check_proxy(proxies, cut_off=bool(bootstraps) and found is None)
    return checks if found is None else [*checks, *[check async for check in _line(found, weights)]]


def _machine(role: Role, directory: Path, weights: int) -> Iterator[Check]:
    """Yield the checks of this machine alone. Blocking."""
    yield check_python(platform.python_version(), 8 * struct.calcsize("P"))
    draws, sees_gpu = role == "sampler", None
    if draws:
        lacks = missing("sampler")
        sees_gpu = _torch_sees_gpu() if not lacks and isinstance(find_gpu(), Gpu) else None
        version = "" if lacks else metadata.version("torch")
        yield from check_torch(version, lacks, choose_engine("auto").line, sees_gpu=sees_gpu)
    free, shared = free_host_bytes(), free_bytes(MEMORY) if MEMORY.is_dir() else 0
    # An engine on a CPU holds the weights in float32: twice their bytes.
    yield check_memory(free, 2 * weights if draws and not sees_gpu else 0)
    yield from check_wear(weights, free, shared, CPU_MEMORY_SHARE if draws and not has_gpu() else MEMORY_SHARE)
    yield check_state(str(directory), _error_in(directory))
    yield check_disk(str(directory), free_bytes(_nearest(directory)) + _weights_in(directory), weights)
    yield from check_sockets(tempfile.gettempdir())
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


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
            yield check_line(got, time.monotonic() - began, weights)


# -- what is made of that: a check with something to do about it, the exact fix, is a finding --------------------------


def check_python(version: str, bits: int) -> Check:
    fix = "" if bits == 64 else "install a 64-bit system and its Python: weights take more than 32 bits address"
    return Check(about="python", what=f"Python {version}, {bits} bits", fix=fix)


def check_torch(version: str, missing: Sequence[str], engine: str, *, sees_gpu: bool | None) -> Iterator[Check]:
    """What draws. `engine` is the line of the choice; `sees_gpu` None if there is no GPU that torch could see."""
    if missing:
        what = f"without {', '.join(missing)} this machine can relay, not draw"
        yield Check(about="torch", what=what, fix=f"{how_to_have('sampler')}; or bin/setup in a checkout")
        return
    yield Check(about="torch", what=f"torch {version}; {engine}")
    if sees_gpu is False:
        fix = "update the NVIDIA driver"
        if "+cpu" in version:
            fix = "pip uninstall torch, then bin/setup --engine vllm in a checkout, or install the wheel again"
        yield Check(about="driver", what=f"torch {version} cannot use the GPU", fix=fix)


def check_memory(free: int, wanted: int) -> Check:
    """`wanted` is what the engine itself takes of it, in bytes; 0 if unknown, or if it draws on a GPU."""
    fix = f"close programs until {size(wanted)} are free, or pass --role relay: it needs no engine"
    told = f", of which the engine takes {size(wanted)}" if wanted else ""
    return Check(about="memory", what=f"{size(free)} of memory are free{told}", fix=fix if wanted > free else "")


def check_wear(weights: int, free: int, shared: int, share: float) -> Iterator[Check]:
    """Whether each version will be written to the disk. `weights` may take `share` of the memory that is free, and of
    what is free in /dev/shm (`shared`)."""
    if weights <= share * min(free, shared):
        return
    needed = size(weights / share)
    fix = f"have {needed} of memory free, or pass --weights memory; if the disk may wear, --weights disk"
    if not shared:
        fix = "pass --weights disk if that disk may wear; only Linux keeps weights in a file system in memory"
    elif shared < weights / share <= free:
        fix = f"mount -o remount,size={-(-weights // (share * 1e9)):.0f}G /dev/shm; in a container --shm-size"
    what = on_disk_line(weights, f"since they may take {share:.0%} of the memory that is free")
    yield Check(about="wear", what=what, fix=fix)


def check_state(directory: str, error: int) -> Check:
    """`error` is the number of the error that a node meets there, or 0."""
    fixes = {
        0: "",
        errno.EACCES: f'sudo chown -R "$USER" {directory}, or pass another --state-dir',
        errno.EROFS: "that disk is mounted read-only: pass a --state-dir on another one",
        errno.ENOTDIR: "a file is in its way: remove that, or pass another --state-dir",
        errno.ENOSPC: "free some space there, or pass a --state-dir on another disk",
    }
    what = f"nothing can be kept in {directory}: {errno.errorcode.get(error, error)}" if error else f"keeps {directory}"
    return Check(about="state", what=what, fix=fixes.get(error, "pass another --state-dir"))


def check_disk(directory: str, free: int, weights: int) -> Check:
    wanted = int((1 + FULL_RATIO) * weights) + SPARE_BYTES
    fix = f"free {size(wanted - free)} there, or pass a --state-dir on a larger disk" if wanted > free else ""
    return Check(
        about="disk",
        what=f"{size(free)} are free, or hold weights already, in {directory}, {size(wanted)} wanted",
        fix=fix,
    )


def check_sockets(directory: str) -> Iterator[Check]:
    """`directory` is that for temporary files."""
    most = SOCKET_BYTES - len(CHILD_SOCKET) - 1
    if len(directory.encode()) > most:
        what = f"{directory} is longer than the {most} bytes for sockets in it"
        yield Check(about="sockets", what=what, fix="export TMPDIR=/tmp")


def check_files(most: int) -> Check:
    fix = "ulimit -n 4096, in the shell that runs join" if most < OPEN_FILES else ""
    return Check(about="files", what=f"{most} files may be open, {OPEN_FILES} wanted", fix=fix)


def check_clock(fault: str) -> Check:
    what, _, fix = fault.partition(": ")
    return Check(about="clock", what=what or "as the swarm's, within two minutes", fix=fix)


def check_proxy(names: Sequence[str], *, cut_off: bool) -> Iterator[Check]:
    """`cut_off`: no member was reached."""
    if names:
        what = f"{', '.join(names)} is set: nodes connect directly, never through a proxy"
        fix = "let this machine open TCP connections itself: ask who runs its network, or take another one"
        yield Check(about="proxy", what=what, fix=fix if cut_off else "")


def check_line(got: int, seconds: float, weights: int) -> Check:
    """`got` bytes came of the weights of the swarm, which take `weights` in all; 0 is unknown."""
    told = f"{size(got)} of the weights came in {seconds:.1f} s"
    if not got:
        return Check(about="line", what=told, fix="take a faster line, or try again when that node is less busy")
    if got < TOLD_BYTES:
        return Check(about="line", what=f"{told}, too little to tell a rate")
    first_s = FULL_RATIO * weights * seconds / got
    fix = "name what you have of the model with --base, or take a faster line" if first_s > PATIENT_S else ""
    first = f", at which the first version takes {max(1.0, first_s / 60):.0f} min" if weights else ""
    return Check(about="line", what=f"{told}: {8e-6 * got / seconds:.1f} Mbit/s{first}", fix=fix)
