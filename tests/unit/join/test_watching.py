"""What a node sees of its owner's wishes and of its machine: a file that changes, power supplies, programs that are
asked, and niceness that is given."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.join import joining
from swarm.join.owner import FILE, Holds, change_limits
from swarm.join.relay import RelayNode
from swarm.join.watch import Watch, is_in_use, is_on_battery
from swarm.net.pace import Pace
from swarm.settings import JoinConfig

START = JoinConfig(bootstrap=("127.0.0.1",), max_upload=10.0)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def watch(tmp_path: Path, said: list[str]) -> Watch:
    return Watch(tmp_path, START, holding=Holds(), say=said.append, on_change=lambda config: None)


def test_a_changed_file_is_taken_at_the_next_look_and_told_once(watch: Watch, tmp_path: Path, said: list[str]) -> None:
    assert not watch.look()
    change_limits(tmp_path / FILE, ["max-upload=none", "nice=5", "only-when=mains"])
    assert watch.look()
    assert (watch.config.max_upload, watch.config.nice) == (None, 5)
    assert not watch.look()
    (tmp_path / FILE).unlink()
    assert watch.look()
    assert watch.config == START
    changes = [("max-upload", "10", "none"), ("nice", "0", "5"), ("only-when", "none", "mains")]
    there = [f"limit changed: {name} is {to}, was {was}" for name, was, to in changes]
    back = [f"limit changed: {name} is {was}, was {to}" for name, was, to in changes]
    assert sorted(said[:3]) == there
    assert sorted(said[3:]) == back


def test_a_file_that_was_spoilt_is_a_line_and_the_limits_stay(watch: Watch, tmp_path: Path, said: list[str]) -> None:
    change_limits(tmp_path / FILE, ["nice=5"])
    watch.look()
    said.clear()
    (tmp_path / FILE).write_text('{"nice": 77, "max_uplod": 3}')
    assert not watch.look()
    assert not watch.look()
    assert watch.config.nice == 5
    assert said == [
        "the limits stay as they were: --nice 77: input should be less than or equal to 19; max-uplod is no limit: did "
        "you mean max-upload?"
    ]
    (tmp_path / FILE).write_text('{"nice": 6}')
    assert watch.look()
    assert watch.config.nice == 6


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Full"}}, False),
        ({"mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, False),
        ({"ucsi": {"type": "USB", "online": "1"}, "BAT1": {"type": "Battery", "status": "Not charging"}}, False),
    ],
)
def test_power_supplies_tell_of_mains(tmp_path: Path, supplies: dict[str, dict[str, str]], on_battery: bool) -> None:
    for name, files in supplies.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text + "\n")
    assert is_on_battery(tmp_path) is on_battery
    assert is_on_battery(tmp_path / "none") is None, "a machine without that directory does not say"


@pytest.mark.parametrize(
    ("programs", "in_use"),
    [
        ({}, None),
        ({"loginctl": "echo IdleHint=no"}, True),
        ({"loginctl": "echo IdleHint=yes", "xprintidle": "echo 1"}, False),
        ({"loginctl": "exit 1", "xprintidle": "echo 299999"}, True),
        ({"loginctl": "exit 1", "xprintidle": "echo 300001"}, False),
        ({"loginctl": "exit 1", "xprintidle": "echo no display"}, None),
    ],
)
def test_programs_say_whether_somebody_uses_the_desktop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], in_use: bool | None
) -> None:
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert is_in_use() is in_use


NICENESS = """
import os, subprocess, sys, threading
from pathlib import Path
from swarm.broadcast.coding import coding_pool
from swarm.join.watch import give_way

pool = coding_pool(1)
coder = pool.submit(threading.get_native_id).result()
stay = threading.Event()
other = threading.Thread(target=stay.wait)
other.start()
engine = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print(flush=True)"
child = subprocess.Popen(
    [sys.executable, "-c", engine], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
child.stdout.readline()
for nice in (5, 12):
    assert give_way(nice, child.pid)
    threads = [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path(f"/proc/{child.pid}/task").iterdir()]
    own = [os.getpriority(os.PRIO_PROCESS, one) for one in (os.getpid(), other.native_id)]
    print(nice, os.getpriority(os.PRIO_PROCESS, coder), set(own), len(threads), set(threads))
stay.set()
child.stdin.close()
pool.shutdown()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="niceness belongs to a thread on Linux alone")
def test_every_thread_and_the_engine_give_way_and_those_that_code_already_do() -> None:
    was = os.getpriority(os.PRIO_PROCESS, 0)
    if was > 5:
        pytest.skip(f"these tests run at niceness {was}, and only root may lower it")
    done = subprocess.run([sys.executable, "-c", NICENESS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["5 10 {5} 2 {5}", "12 12 {12} 2 {12}"]


async def test_niceness_that_nobody_asked_for_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def give_way(nice: int, engine_pid: int | None) -> bool:
        given.append(nice)
        return True

    monkeypatch.setattr(joining, "give_way", give_way)
    config = JoinConfig(bootstrap=("127.0.0.1",), role="relay")
    node = RelayNode(config, print)
    node._directory = tmp_path
    node._network = cast(Any, SimpleNamespace(station=SimpleNamespace(upload=Pace(None), download=Pace(None))))
    node._take_limits(config)
    assert given == []
    node._take_limits(config.model_copy(update={"nice": 7}))
    assert given == [7]


async def test_a_watch_that_broke_is_told_of() -> None:
    said: list[str] = []
    node = RelayNode(JoinConfig(bootstrap=("127.0.0.1",), role="relay"), said.append)

    async def breaks() -> None:
        raise RuntimeError("no such clock")

    watching = asyncio.ensure_future(breaks())
    await asyncio.wait([watching])
    node._say_unwatched(watching)
    assert said == ["limits and clocks are not watched any more (RuntimeError('no such clock')): start the node again"]
