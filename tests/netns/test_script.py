"""bin/netns-swarm, as a person runs it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.netns.hosts import owned_name, remove, swarms

SCRIPT = Path(__file__).parents[2] / "bin" / "netns-swarm"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def name() -> Iterator[str]:
    """A name of this process, so that the next run removes what a killed one leaves."""
    name = owned_name()
    yield name
    remove(name)


@pytest.fixture
def run(name: str) -> Run:
    """The script on a swarm of this test; words after `command` are given to exec."""

    def run(*arguments: str, command: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        whole = [str(SCRIPT), *arguments, "--name", name, *(["--", *command] if command else [])]
        return subprocess.run(whole, capture_output=True, text=True, timeout=60, check=False)

    return run


def _notes(run: Run) -> list[list[str]]:
    return [line.split()[3:] for line in run("list").stdout.splitlines()]


def test_a_swarm_from_up_to_down(run: Run, name: str) -> None:
    up = run("up", "--hosts", "3", "--up-mbit", "50", "--down-mbit", "100")
    assert up.returncode == 0, up.stderr
    assert up.stdout == run("list").stdout
    assert run("partition", "1,2", "3").returncode == 0
    assert run("shield", "2").returncode == 0
    assert _notes(run) == [["cut1"], ["cut1", "shielded"], ["cut2"]]
    assert run("heal").returncode == 0
    assert _notes(run) == [["whole"], ["whole", "shielded"], ["whole"]]
    assert run("unshield", "2").returncode == 0
    assert _notes(run) == [["whole"], ["whole"], ["whole"]]
    address = run("list").stdout.splitlines()[1].split()[1]
    asked = ("sh", "-c", 'ip -4 address show dev eth0; echo "$@"; exit 7', "sh", "a", "--", "b")
    done = run("exec", "2", command=asked)
    assert (done.returncode, address in done.stdout, done.stdout.endswith("a -- b\n")) == (7, True, True)
    assert run("down").returncode == 0
    assert run("list").stdout == ""
    assert run("down").returncode == 0
    assert name not in swarms()
