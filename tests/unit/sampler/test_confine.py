"""What an engine's process says that it can still do, on systems that allow more or less."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.confine import NATIVE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has namespaces and filters")

WITHOUT_NAMESPACES = """
import os, socket, sys
from swarm import confine
confine._enter_namespaces = lambda libc, net: False
said = confine.confine([sys.argv[2]], needs_loopback=sys.argv[3] == "loopback")
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5.0)
    print("reached")
except OSError as error:
    print(os.strerror(error.errno))
socket.socketpair(socket.AF_UNIX)
socket.socket(socket.AF_UNIX)
print(said)
"""

ALL_FAMILIES = """
import socket, sys
from swarm import confine
if sys.argv[1] == "apart":
    confine._enter_namespaces = lambda libc, net: True  # A filter does not depend on them
print(confine.confine([], needs_loopback=sys.argv[1] == "loopback"))
for family in range(64):
    try:
        socket.socket(family, socket.SOCK_DGRAM).close()
    except OSError as error:
        if error.errno == 97:  # EAFNOSUPPORT
            continue
    print(socket.AddressFamily(family).name)
"""


def confined(key: Path, wants: str) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = [str(server.getsockname()[1]), str(key), wants]
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_NAMESPACES, *given], capture_output=True, text=True, check=True
        )
    return done.stdout.splitlines()


def test_without_namespaces_a_filter_leaves_unix_sockets_alone(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    tried, said = confined(tmp_path / "key", "nothing")
    if "reach the network" in said:
        pytest.skip(f"this system has no filters of system calls: {said}")
    assert tried == "Address family not supported by protocol"
    assert said.startswith("the engine process can read the node's keys: this system allows it no user namespace")


def test_an_engine_that_needs_loopback_goes_on_and_says_what_it_can_reach(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    tried, said = confined(tmp_path / "key", "loopback")
    assert tried == "reached"
    assert said.startswith("the engine process can reach the network and read the node's keys: ")


@pytest.mark.parametrize("how", ["apart", "loopback"])
def test_of_what_namespaces_do_not_hold_an_engine_may_make_no_socket(how: str) -> None:
    """By AF_VSOCK, which the namespace of a network does not hold, a virtual machine reaches its host."""
    done = subprocess.run([sys.executable, "-c", ALL_FAMILIES, how], capture_output=True, text=True, check=True)
    said, *families = done.stdout.splitlines()
    if "AF_PACKET" in families and platform.machine() not in NATIVE:
        pytest.skip(f"this system has no filters of system calls: {said}")
    assert set(families) <= {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"}
    assert {"AF_UNIX", "AF_INET"} <= set(families)
