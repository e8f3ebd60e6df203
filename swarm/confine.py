"""Confines an engine's process before it reads anything from a learner: no network, no keys, no privileges.

On Linux it enters namespaces of its own. Its network has nothing but a loopback; the files with the node's keys are
covered; and the node's memory and descriptors belong to another user namespace, so they cannot be opened. The process
reaches the node over a socket in the file system and a GPU over /dev: neither depends on namespaces.

A network namespace does not confine every kind of socket: over vsock a virtual machine reaches its host. So a system
call filter allows only Unix sockets and those that the namespace confines. Most containers, and Ubuntu from 24.04,
allow no user namespaces. There the filter allows Unix sockets alone. vLLM needs TCP between its own processes, and a
filter cannot tell that from other TCP.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
CAPABILITIES_3 = 0x20080522  # The present form of capset's arguments: two words of 32 bits for each set
FILE_RIGHTS = 0b1011  # CHOWN, DAC_OVERRIDE, FOWNER: root's samplers may run from another user's files
NATIVE = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # AUDIT_ARCH, and the number of socket()
IO_URING_SETUP = 425  # io_uring could make sockets that the filter does not see
IN_NAMESPACE = (socket.AF_INET, socket.AF_INET6, *((socket.AF_NETLINK,) if sys.platform == "linux" else ()))
OTHER_ABI = 0x40000000  # Call numbers from here on are x32's, which has its own socket()
MODPROBE_S = 20.0  # Loading a driver takes seconds

STACKS_BYTES = 2 << 30
"""Reserved address space that stays untouched: 8 MiB of stack for each of 256 threads."""

NO_NAMESPACES = "this system allows it no user namespace (see engines.md)"


def confine(secrets: Sequence[str], *, needs_loopback: bool, name: str = "engine", network: bool = False) -> str:
    """Confine this process and its children as the module says, as far as the system allows. Call it before any thread
    is started. With `network` it only hides the secrets. Return a line that says what the process can still do that it
    should not, or ""."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if sys.platform != "linux":
        return f"the {name} process can reach the network and the node's keys: {sys.platform} has no namespaces"
    libc = ctypes.CDLL(None, use_errno=True)
    _wake_gpu()
    apart = _enter_namespaces(libc, 0 if network else CLONE_NEWNET)
    covered = [apart and _cover(libc, path) for path in secrets if os.path.exists(path)]
    _give_up_rights(libc)
    may_dial = apart or needs_loopback
    filtered = network or _refuse_sockets(libc, (socket.AF_UNIX, *(IN_NAMESPACE if may_dial else ())))
    reaches = [] if network or (filtered and (apart or not may_dial)) else ["reach the network"]
    reaches += [] if all(covered) else ["read the node's keys"]
    return f"the {name} process can {' and '.join(reaches)}: {NO_NAMESPACES}" if reaches else ""


def has_gpu() -> bool:
    """Return whether there is a GPU driver; such a driver maps far more memory than it uses."""
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))


def _wake_gpu() -> None:
    """Load the driver that CUDA would load at its first use. It takes root's rights, which are gone later."""
    if Path("/dev/nvidiactl").exists() and not Path("/dev/nvidia-uvm").exists():
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["nvidia-modprobe", "-u", "-c=0"], timeout=MODPROBE_S, check=False)


def _enter_namespaces(libc: ctypes.CDLL, net: int) -> bool:
    uid, gid, flags = os.geteuid(), os.getegid(), net | CLONE_NEWNS
    # Root needs no user namespace; inside one it could no longer read other users' files.
    if uid != 0 or libc.unshare(flags) != 0:
        if libc.unshare(flags | CLONE_NEWUSER) != 0:
            return False
        with suppress(OSError):
            for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                Path("/proc/self", name).write_text(line)
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    return True


def _cover(libc: ctypes.CDLL, path: str) -> bool:
    """Mount /dev/null over the file at `path`, for this process alone."""
    # Without this the file would be covered for the node too.
    if libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) != 0:
        return False
    return bool(libc.mount(b"/dev/null", os.fsencode(path), None, ctypes.c_ulong(MS_BIND), None) == 0)


def _give_up_rights(libc: ctypes.CDLL) -> None:
    """Drop all capabilities, which could undo the namespaces, and gain none by starting another program."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kept = FILE_RIGHTS if os.geteuid() == 0 else 0
    libc.capset(struct.pack("=Ii", CAPABILITIES_3, 0), struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def _refuse_sockets(libc: ctypes.CDLL, families: Sequence[int]) -> bool:
    """Install a filter of system calls: this process may make sockets of these families only."""
    if platform.machine() not in NATIVE:
        return False
    arch, make_socket = NATIVE[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT
    more = len(families)
    # (operation, lines to skip if true, if false, operand). A call's data: number, architecture, ..., arguments.
    lines = (
        (load, 0, 0, 4),
        (equal, 0, 5 + more, arch),
        (load, 0, 0, 0),
        (equal, 3 + more, 0, IO_URING_SETUP),
        (at_least, 2 + more, 0, OTHER_ABI),
        (equal, 0, 2 + more, make_socket),
        (load, 0, 0, 16),
        *((equal, more - i, 0, family) for i, family in enumerate(families)),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = struct.pack("@HP", len(lines), ctypes.addressof(code))
    return bool(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0)
