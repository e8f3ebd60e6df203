"""Real `lead` and `join` processes for tests, on loopback. Whatever was started is ended, even when a test fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 120.0
"""Longest wait for anything, on two busy cores; a test that passes waits for what it asks, not for this."""

POLL_S = 0.05


class Node:
    """One process of the command line, and what it printed."""

    def __init__(self, directory: Path, name: str, *arguments: str) -> None:
        self.log = directory / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swarm", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, words: str) -> bool:
        return words in self.output()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def end(self) -> None:
        """Kill the process and whatever it started."""
        if self.process.poll() is None:
            for process in [*self.children(), psutil.Process(self.process.pid)]:
                if process.is_running():
                    process.kill()
        self.process.wait()


class Learner(Node):
    """A `lead` process and its run directory."""

    def __init__(self, directory: Path, name: str, *arguments: str) -> None:
        self.run_dir = directory / name
        super().__init__(directory, name, "lead", "--run-dir", str(self.run_dir), *arguments)

    def url(self) -> str:
        path = self.run_dir / "node.json"
        eventually(lambda: path.exists() and path.read_text().endswith("\n"), self, "the learner listens")
        return str(json.loads(path.read_text())["url"])

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(urllib.request.urlopen(self.url() + "/v1/status", timeout=10).read())
        return found

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]


class Swarm:
    """The processes of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: list[Node] = []

    def lead(self, *arguments: str, name: str = "run") -> Learner:
        """A learner; quick beats, so that silence is noticed in under two seconds."""
        config = self.directory / "lead.toml"
        config.write_text("beat_s = 0.5\ngroups_per_step = 4\ngroup_size = 4\neval_prompts = 8\n")
        learner = Learner(self.directory, name, "--config", str(config), *arguments)
        self.nodes.append(learner)
        return learner

    def join(self, bootstrap: str, *, name: str) -> Node:
        state = str(self.directory / f"state-{name}")
        node = Node(self.directory, name, "join", "--role", "sampler", "--bootstrap", bootstrap, "--state-dir", state)
        self.nodes.append(node)
        return node


@contextmanager
def swarm_in(directory: Path) -> Iterator[Swarm]:
    swarm = Swarm(directory)
    try:
        yield swarm
    finally:
        for node in swarm.nodes:
            node.end()


def eventually(condition: Callable[[], Any], node: Node, what: str) -> None:
    """Poll until `condition` holds; what was waited for and the node's words if it never does."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"never came true: {what}\n{node.output()}"
        time.sleep(POLL_S)


def accepted_by(status: dict[str, Any]) -> dict[str, int]:
    """Accepted rollouts by sampler."""
    return {sampler["node"]: sampler["verdicts"].get("accepted", 0) for sampler in status["samplers"]}


def command(*arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "swarm", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
