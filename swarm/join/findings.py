"""What `doctor` makes of what it sees on a machine, one check each. A check with something to do about it, the exact
fix, is a finding. Pure."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.broadcast.store.disk import SPARE_BYTES
from swarm.broadcast.store.place import on_disk_line
from swarm.broadcast.version.codec import FULL_RATIO
from swarm.extras import how_to_have
from swarm.node.hello import size

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


def python(version: str, bits: int) -> Check:
    fix = "" if bits == 64 else "install a 64-bit system and its Python: weights take more than 32 bits address"
    return Check(about="python", what=f"Python {version}, {bits} bits", fix=fix)


def torch(version: str, missing: Sequence[str], engine: str, *, sees_gpu: bool | None) -> Iterator[Check]:
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


def memory(free: int, wanted: int) -> Check:
    """`wanted` is what the engine itself takes of it, in bytes; 0 if unknown, or if it draws on a GPU."""
    fix = f"close programs until {size(wanted)} are free, or pass --role relay: it needs no engine"
    told = f", of which the engine takes {size(wanted)}" if wanted else ""
    return Check(about="memory", what=f"{size(free)} of memory are free{told}", fix=fix if wanted > free else "")


def wear(weights: int, free: int, shared: int, share: float) -> Iterator[Check]:
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


def state(directory: str, error: int) -> Check:
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


def disk(directory: str, free: int, weights: int) -> Check:
    wanted = int((1 + FULL_RATIO) * weights) + SPARE_BYTES
    fix = f"free {size(wanted - free)} there, or pass a --state-dir on a larger disk" if wanted > free else ""
    return Check(
        about="disk",
        what=f"{size(free)} are free, or hold weights already, in {directory}, {size(wanted)} wanted",
        fix=fix,
    )


def sockets(directory: str) -> Iterator[Check]:
    """`directory` is that for temporary files."""
    most = SOCKET_BYTES - len(CHILD_SOCKET) - 1
    if len(directory.encode()) > most:
        what = f"{directory} is longer than the {most} bytes for sockets in it"
        yield Check(about="sockets", what=what, fix="export TMPDIR=/tmp")


def files(most: int) -> Check:
    fix = "ulimit -n 4096, in the shell that runs join" if most < OPEN_FILES else ""
    return Check(about="files", what=f"{most} files may be open, {OPEN_FILES} wanted", fix=fix)


def clock(fault: str) -> Check:
    what, _, fix = fault.partition(": ")
    return Check(about="clock", what=what or "as the swarm's, within two minutes", fix=fix)


def proxy(names: Sequence[str], *, cut_off: bool) -> Iterator[Check]:
    """`cut_off`: no member was reached."""
    if names:
        what = f"{', '.join(names)} is set: nodes connect directly, never through a proxy"
        fix = "let this machine open TCP connections itself: ask who runs its network, or take another one"
        yield Check(about="proxy", what=what, fix=fix if cut_off else "")


def line(got: int, seconds: float, weights: int) -> Check:
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
