"""One run by a real swarm on loopback: `lead` and a few `join` processes, as `echo-node demo` starts them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import Figures
from swarm.settings import LeadConfig
from swarm.settings_file import as_toml
from tests.integration.processes import Node
from tests.netns.hosts import Host

START_S = 60.0  # Until the learner listens; it does so before its trainer has imported anything
LIMIT_S, LIMIT_PER_STEP_S = 120.0, 5.0  # A run that takes longer has hung
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One learner step. `at_s`: when its training was done; staleness is in steps, over the rollouts of its batch."""

    at_s: float
    reward: float
    staleness_mean: float
    staleness_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: two steps at least, and the greedy exact match of the last version on held-out prompts."""

    steps: Sequence[Step]
    accuracy: float


def step_of(metrics: Figures, at_s: float) -> Step:
    return Step(
        at_s=at_s,
        reward=metrics["reward"],
        staleness_mean=metrics["staleness/mean"],
        staleness_max=metrics["staleness/max"],
    )


class RunFailed(Exception):
    """A swarm did not come to the end of its run."""


class Ending(Node):
    """One that ends when this process does, in a namespace if one is named."""

    def __init__(
        self, directory: Path, name: str, *arguments: str, module: str, host: Host | None, is_node: bool
    ) -> None:
        words = [sys.executable, "-m", module, *arguments, *["--stop-with-stdin"] * is_node]
        self._start(name, directory / f"{name}.log", host.command(words) if host else words, stdin=subprocess.PIPE)


class Nodes:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._nodes: dict[str, Node] = {}

    def start(
        self, name: str, *arguments: str, module: str = "swarm", host: Host | None = None, is_node: bool = True
    ) -> Node:
        """Start `python -m MODULE ARGUMENTS`."""
        self._nodes[name] = Ending(self.directory, name, *arguments, module=module, host=host, is_node=is_node)
        return self._nodes[name]

    def kill(self, name: str) -> None:
        """With all that it started."""
        self._nodes.pop(name).end()

    def check(self, *allowed: tuple[str, int]) -> None:
        """RunFailed, with its last words, if a process has ended with a status other than 0 that is not allowed."""
        for name, node in self._nodes.items():
            status = node.process.poll()
            if status and (name, status) not in allowed:
                last = " | ".join(node.output().strip().splitlines()[-3:]) or "it said nothing"
                raise RunFailed(f"{name} ended with status {status}: {last}")


@contextmanager
def nodes_in(directory: Path) -> Iterator[Nodes]:
    """Nodes that are ended at the end, whatever happens."""
    nodes = Nodes(directory)
    try:
        yield nodes
    finally:
        for name in [*nodes._nodes]:
            nodes.kill(name)


def run(config: LeadConfig, samplers: int, directory: Path, join: Sequence[str] = ()) -> Run:
    """The run of `config` with a number of samplers, each with the flags `join` too; everything it writes goes to
    `directory`. RunFailed if it fails."""
    run_dir = directory / "run"
    settings = directory / "lead.toml"
    settings.write_text(as_toml(LeadConfig, config.model_dump(exclude_unset=True)))
    with nodes_in(directory) as nodes:
        flags = ("--host", "127.0.0.1", "--port", "0", "--config", str(settings), "--run-dir", str(run_dir))
        learner = nodes.start("learner", "lead", *flags)
        url = url_of(nodes, run_dir / "node.json")
        for number in range(samplers):
            state = str(directory / f"sampler-{number}")
            nodes.start(f"sampler-{number}", "join", "--lan", "--bootstrap", url, "--state-dir", state, *join)
        until = time.monotonic() + LIMIT_S + LIMIT_PER_STEP_S * config.steps
        while learner.process.poll() is None:
            nodes.check()
            if time.monotonic() > until:
                raise RunFailed("the run did not end in time")
            time.sleep(POLL_S)
        nodes.check()
    return read_run(run_dir, config.steps)


def read_run(run_dir: Path, steps: int) -> Run:
    """A finished run from its files. RunFailed if it is not of that many steps or its last version not evaluated."""
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = lines_of(run_dir / "metrics.jsonl")
    last = summary["held_out"][-1]
    if not len(lines) == last["version"] == steps:
        raise RunFailed(f"{len(lines)} steps of {steps}, evaluated at version {last['version']}")
    return Run(steps=[step_of(line, line["time"]) for line in lines], accuracy=last["exact_match"])


def lines_of(path: Path) -> list[Figures]:
    """The whole lines of a file that a run writes; none before there is one."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def url_of(nodes: Nodes, path: Path) -> str:
    until = time.monotonic() + START_S
    while not path.exists():
        nodes.check()
        if time.monotonic() > until:
            raise RunFailed("the learner did not start")
        time.sleep(POLL_S)
    return str(json.loads(path.read_text())["url"])
