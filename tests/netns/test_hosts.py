"""The hosts themselves: they reach one another, are cut, healed and shielded, and nothing of them stays. That rates
hold shows in test_broadcast_benchmark.py: nothing is faster than its bound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.netns.hosts import hosts, swarms, sweep
from tests.netns.traffic import answered, connect, dial, echoes, receive, serve_echo, unanswered, until


def test_a_cut_is_silent_and_connections_outlive_it_and_a_shield_drops_what_comes_alone() -> None:
    with hosts(3) as trio:
        for host in trio:
            serve_echo(host)
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
                trio.heal()
                assert receive(far, 12) == b"over the cut"
                until(lambda: answered(opening), "the connection is made after the cut")

            trio.shield(second)
            with dial(first, second) as opening, connect(second, first) as outgoing:
                assert echoes(outgoing)
                assert echoes(near)
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
