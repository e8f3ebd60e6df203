"""Traffic between hosts. Sockets are the test's own, opened in a host, so that it can ask the kernel about them."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.netns.hosts import Host

PORT = 8000

PATIENCE_S = 60.0
"""Longest wait for anything; a test that passes waits for what it asks, not for this."""

POLL_S = 0.02

UNANSWERED = 3
"""Tries without an answer after which a cut counts as silent. Unknown MACs would be reported by then."""


def until(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition` holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never came true: {what}"
        time.sleep(POLL_S)


def serve_echo(host: Host) -> None:
    arguments = [sys.executable, str(Path(__file__).with_name("echo.py")), str(PORT)]
    process = host.popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.readline() == "ready\n"


def connect(client: Host, server: Host) -> socket.socket:
    with client.inside():
        return socket.create_connection((server.address, PORT), timeout=PATIENCE_S)


def dial(client: Host, server: Host) -> socket.socket:
    """Begin to connect, and wait for nothing."""
    with client.inside():
        opening = socket.socket()
    opening.setblocking(False)
    assert opening.connect_ex((server.address, PORT)) == errno.EINPROGRESS
    return opening


def echoes(open_: socket.socket, words: bytes = b"hello") -> bool:
    open_.settimeout(PATIENCE_S)
    open_.sendall(words)
    return receive(open_, len(words)) == words


def receive(open_: socket.socket, length: int) -> bytes:
    return open_.recv(length, socket.MSG_WAITALL)


def answered(opening: socket.socket) -> bool:
    """True once a connection that `dial` began is there; raises what the network reported instead."""
    error = opening.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, errno.errorcode[error])
    try:
        opening.getpeername()
    except OSError:
        return False
    return True


def unanswered(open_: socket.socket) -> bool:
    """True once the kernel has sent the same thing again so often without an answer; raises what was reported."""
    assert open_.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    retransmits = open_.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2]
    return retransmits >= UNANSWERED
