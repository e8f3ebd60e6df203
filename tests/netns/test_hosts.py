"""The hosts themselves: they reach one another, shaped, cut, healed and shielded, and nothing of them stays."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.netns.hosts import Host, Hosts, hosts, swarms, sweep
from tests.netns.traffic import PORT, answered, connect, dial, echoes, receive, serve_echo, unanswered, until

FILE_BYTES = 1_000_000


@pytest.fixture
def trio() -> Iterator[Hosts]:
    """Three hosts with an echo server each."""
    with hosts(3) as swarm:
        for host in swarm:
            serve_echo(host)
        yield swarm


def _serve_file(host: Host, directory: Path) -> None:
    (directory / "file").write_bytes(os.urandom(FILE_BYTES))
    host.popen(
        [sys.executable, "-m", "http.server", str(PORT), "--directory", str(directory)], stderr=subprocess.DEVNULL
    )

    def listens() -> bool:
        with host.inside(), socket.socket() as probe:
            return probe.connect_ex((host.address, PORT)) == 0

    until(listens, "the file server listens")


def _fetch_s(client: Host, server: Host) -> float:
    """How long the file takes."""
    with client.inside():
        connection = http.client.HTTPConnection(server.address, PORT, timeout=60)
        connection.connect()
    start = time.perf_counter()
    connection.request("GET", "/file")
    assert len(connection.getresponse().read()) == FILE_BYTES
    connection.close()
    return time.perf_counter() - start


@pytest.mark.parametrize("direction", ["up_mbit", "down_mbit"])
def test_a_rate_holds_as_against_another_rate(direction: str, tmp_path: Path) -> None:
    with hosts(2, **{direction: 32.0}) as swarm:  # the fast one first: a first fetch takes longer
        server, client = swarm
        _serve_file(server, tmp_path)
        fast_s = _fetch_s(client, server)
        swarm.shape(server if direction == "up_mbit" else client, **{direction: 4.0})
        assert 3 < _fetch_s(client, server) / fast_s < 16


def test_a_partition_is_silent_and_a_connection_outlives_it(trio: Hosts) -> None:
    first, second, third = trio
    with connect(first, second) as near, connect(first, third) as far:
        assert echoes(far)
        trio.partition([[first, second], [third]])
        with dial(first, third) as opening:
            far.sendall(b"over the cut")
            until(lambda: unanswered(far), "a segment over the cut is sent again")
            until(lambda: unanswered(opening), "a connection over the cut is tried again")
            assert not answered(opening)
            assert echoes(near)
            with connect(second, first) as anew:
                assert echoes(anew)
            trio.heal()
            assert receive(far, 12) == b"over the cut"
            until(lambda: answered(opening), "the connection is made after the cut")


def test_a_shield_drops_what_comes_and_lets_out_what_goes(trio: Hosts) -> None:
    first, second, _ = trio
    with connect(first, second) as before:
        trio.shield(second)
        trio.shield(second)
        with dial(first, second) as opening, connect(second, first) as outgoing:
            assert echoes(outgoing)
            assert echoes(before)
            until(lambda: unanswered(opening), "a connection to the shielded host is tried again")
            assert not answered(opening)
            trio.unshield(second)
            until(lambda: answered(opening), "the connection is made without the shield")


def _runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


LEAVES_A_SWARM = """
from tests.netns.hosts import hosts
with hosts(1) as swarm:
    process = swarm.host(1).popen(["sleep", "1000"])
    print(swarm.name, process.pid, flush=True)
    input()
"""


def test_what_a_killed_process_left_goes_with_the_next_run() -> None:
    command = [sys.executable, "-c", LEAVES_A_SWARM]
    root = Path(__file__).parents[2]
    with (
        hosts(1) as own,
        subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
    ):
        assert killed.stdout is not None
        left, pid = killed.stdout.readline().split()
        process = psutil.Process(int(pid))
        sweep()
        assert left in swarms()
        killed.kill()
        killed.wait()
        sweep()
        assert left not in swarms()
        assert own.name in swarms()
        until(lambda: not _runs(process), "what ran in it is gone")
