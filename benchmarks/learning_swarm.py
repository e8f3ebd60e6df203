"""One run by a real swarm on loopback: `lead` and a few `join` processes, as `echo-node demo` starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Figures
from swarm.settings import LeadConfig
from swarm.settings_file import as_toml
from tests.netns.hosts import Host

START_S = 60.0  # Until the learner listens; it does so before its trainer has imported anything

LIMIT_S, LIMIT_PER_STEP_S = 120.0, 5.0  # A run that takes longer has hung

STOP_S = 20.0  # After a polite request a node gets this long, which covers a sampler's drain, before it is killed
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


class Nodes:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, *arguments: str, module: str = "swarm", host: Host | None = None, is_node: bool = True
    ) -> subprocess.Popen[bytes]:
        """Start `python -m MODULE ARGUMENTS`, in a namespace if one is named. A node ends when this process does."""
        popen: Any = host.popen if host else subprocess.Popen
        with self._log(name).open("wb") as log:
            self._processes[name] = popen(
                [sys.executable, "-m", module, *arguments, *(["--stop-with-stdin"] if is_node else [])],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Several engines share the cores; more threads each would only wait for one another.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self._processes[name]

    def kill(self, name: str) -> None:
        """With all that it started."""
        process = self._processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def check(self, *allowed: tuple[str, int]) -> None:
        """RunFailed, with its last words, if a process has ended with a status other than 0 that is not allowed."""
        for name, process in self._processes.items():
            if process.poll() and (name, process.returncode) not in allowed:
                raise RunFailed(f"{name} ended with status {process.returncode}: {self._tail(name)}")

    def stop(self) -> None:
        """No process outlives this: asked first, killed after STOP_S."""
        for process in self._processes.values():
            process.terminate()
        until = time.monotonic() + STOP_S
        try:
            for process in self._processes.values():
                process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _tail(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "it said nothing"


@contextmanager
def nodes_in(directory: Path) -> Iterator[Nodes]:
    """Nodes that are stopped at the end, whatever happens."""
    nodes = Nodes(directory)
    try:
        yield nodes
    finally:
        nodes.stop()


def run(
    config: LeadConfig,
    samplers: int,
    directory: Path,
    join: Sequence[str] = (),
    *,
    step_limit_s: float = LIMIT_PER_STEP_S,
) -> Run:
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
        until = time.monotonic() + LIMIT_S + step_limit_s * config.steps
        while learner.poll() is None:
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
