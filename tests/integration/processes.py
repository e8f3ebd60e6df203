"""Real `lead` and `join` processes for tests, on loopback. Whatever was started is ended, even when a test fails."""

from __future__ import annotations

import io
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from pydantic import BaseModel

from swarm.cli.run import run
from swarm.settings import JoinConfig, LeadConfig
from swarm.settings_file import as_toml

PATIENCE_S = 240.0
"""Longest wait for anything, on two busy cores; a test that passes waits for what it asks, not for this."""

POLL_S = 0.05


class Node:
    """One process of the command line, and what it printed. `place` is put before its command, to run it elsewhere;
    `module`, which may have arguments of its own, is what runs in place of the product."""

    def __init__(
        self, directory: Path, name: str, *arguments: str, place: Sequence[str] = (), module: str = "swarm"
    ) -> None:
        self._start(name, directory / f"{name}.log", [*place, sys.executable, "-m", *module.split(), *arguments])

    def _start(
        self,
        name: str,
        log: Path,
        words: Sequence[str | Path],
        *,
        where: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.name, self.log = name, log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                words,
                cwd=where,
                env=environment or {**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=stdin,
                stdout=output,
                stderr=output,
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

    def kill(self) -> None:
        """SIGKILL, as by a power cut."""
        self.signal(signal.SIGKILL)
        self.wait()

    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def end(self) -> None:
        """Kill the process and whatever it started."""
        if self.process.poll() is None:
            for process in [*self.children(), psutil.Process(self.process.pid)]:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass  # It ended meanwhile.
        self.process.wait()

    def url(self) -> str:
        """Where it answers, as it says at its start."""
        said = "; status: echo-node status "
        eventually(lambda: self.says(said), self, f"{self.name} listens")
        line = next(line for line in self.output().splitlines() if said in line)
        return line.rpartition(" ")[2]

    def address(self) -> str:
        return self.url().rpartition("/")[2]

    def status(self) -> dict[str, Any]:
        """What it says of itself, over whatever it speaks. Where its run lies is its user's business."""
        status = fetch_status(self.url())
        assert "run_dir" not in status
        return status


class Learner(Node):
    """A `lead` process and its run directory."""

    def __init__(
        self, directory: Path, name: str, *arguments: str, place: Sequence[str] = (), module: str = "swarm"
    ) -> None:
        self.run_dir = directory / name
        here = () if "--host" in arguments else ("--host", "127.0.0.1")
        given = ("lead", "--run-dir", str(self.run_dir), "--samplers", "0", *here, *arguments)
        super().__init__(directory, name, *given, place=place, module=module)

    def node_json(self) -> dict[str, str]:
        path = self.run_dir / "node.json"
        eventually(lambda: path.exists() and path.read_text().endswith("\n"), self, "the learner listens")
        found: dict[str, str] = json.loads(path.read_text())
        return found

    def url(self) -> str:
        return self.node_json()["url"]

    def join_line(self) -> str:
        return self.node_json()["join"]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]

    def metrics(self) -> list[dict[str, Any]]:
        """The figures of each step."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found

    def verified(self) -> dict[str, Any]:
        """What `verify` says of its run, which is without a breach."""
        done = command("verify", str(self.run_dir), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "no rollout was too old, lost or used twice" in done.stdout
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert found["breaches"] == []
        return found


class Resumed(Learner):
    """A `lead --resume` process."""

    def __init__(self, before: Learner, name: str, *arguments: str) -> None:
        self.run_dir = before.run_dir
        Node.__init__(self, before.log.parent, name, "lead", "--resume", str(before.run_dir), *arguments)

    def node_json(self) -> dict[str, str]:
        # The file of the life before is still there.
        eventually(lambda: self.says("learner of swarm"), self, "the resumed learner listens")
        return super().node_json()


class Publisher(Node):
    """benchmarks/broadcast_learner.py: a learner whose versions are random bytes, published when told. `arguments`
    are more of its own."""

    def __init__(
        self,
        directory: Path,
        name: str,
        port: int,
        *arguments: str,
        size: int,
        host: str = "127.0.0.1",
        place: Sequence[str] = (),
    ) -> None:
        given = ["--directory", str(directory / "publisher"), "--host", host]
        given += ["--port", str(port), "--size-bytes", str(size), *arguments]
        words = [*place, sys.executable, "-m", "benchmarks.broadcast_learner", *given]
        self._start(name, directory / f"{name}.log", words, stdin=subprocess.PIPE)
        eventually(lambda: self.event("listening"), self, "the learner listens")

    def event(self, kind: str) -> dict[str, Any]:
        """The last event of a kind, or nothing."""
        lines = [json.loads(line) for line in self.output().splitlines() if line.startswith("{") and line.endswith("}")]
        return next((line for line in reversed(lines) if line["event"] == kind), {})

    def url(self) -> str:
        return str(self.event("listening")["url"])

    def publish(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"publish\n")
        self.process.stdin.flush()


N = TypeVar("N", bound=Node)


class Swarm:
    """The processes of one test. Quick beats and rounds, so that silence is noticed in seconds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: list[Node] = []
        self._drawn: dict[str, Any] = {}
        self._leads: dict[str, object] = {
            "beat_s": 0.5,
            "groups_per_step": 4,
            "group_size": 4,
            "eval_prompts": 8,
            # What samplers without a model claim and draw is of no model's. At this rate the learner's model stays so
            # near to the untrained one, whose log-probs they claim, that no alarm goes off.
            "learning_rate": 1e-5,
            "audit_share": 0.0,
        }
        self.lead_with()
        self.draw_at(0.0)

    def lead_with(self, **settings: object) -> None:
        """More settings of learners to come."""
        self._leads |= settings
        self._lead = self._write("lead.toml", LeadConfig, self._leads)

    def draw_at(self, tokens_per_s: float, noise: float = 0.0, **settings: object) -> None:
        """The pace of samplers without a model to come (tests/scripted_engine.py), and more of their settings."""
        pace = {"engine_arguments": {"tokens_per_s": tokens_per_s, "noise": noise}}
        self._drawn = {"engine": "vllm", "batch_samples": 8, **pace, **settings}

    def lead(self, *arguments: str, name: str = "run", place: Sequence[str] = (), module: str = "swarm") -> Learner:
        given = ("--config", str(self._lead), *arguments)
        learner = Learner(self.directory, name, *given, place=place, module=module)
        self.nodes.append(learner)
        return learner

    def resume(self, before: Learner, *arguments: str, name: str) -> Learner:
        """Another process that goes on with the run of `before`, which has ended."""
        learner = Resumed(before, name, *arguments)
        self.nodes.append(learner)
        return learner

    def join(
        self, bootstrap: str, *arguments: str, name: str, place: Sequence[str] = (), module: str = "swarm"
    ) -> Node:
        """A sampler, unless `arguments` give another role."""
        state = str(self.directory / f"state-{name}")
        given = ("join", "--bootstrap", bootstrap, "--state-dir", state, *arguments)
        node = Node(self.directory, name, *given, place=place, module=module)
        self.nodes.append(node)
        return node

    def relay(self, bootstrap: str, *arguments: str, name: str, place: Sequence[str] = ()) -> Node:
        return self.join(bootstrap, "--role", "relay", *arguments, name=name, place=place)

    def scripted(
        self,
        bootstrap: str,
        *arguments: str,
        name: str,
        place: Sequence[str] = (),
        module: str = "swarm",
        device_name: str = "",
    ) -> Node:
        """A sampler without a model, on a device that has this name."""
        device = {**self._drawn["engine_arguments"], "device_name": device_name}
        config = self._write(f"{name}.toml", JoinConfig, {**self._drawn, "engine_arguments": device})
        given, module = ("--config", str(config), *arguments), f"tests.scripted {module}"
        return self.join(bootstrap, *given, name=name, place=place, module=module)

    def linked_relays(self, learner: Node, count: int, *arguments: str) -> list[Node]:
        """Relays that are linked with the learner and with one another; their names are relay-0 and so on."""
        relays = [self.relay(learner.url(), "--lan", *arguments, name=f"relay-{number}") for number in range(count)]
        eventually_each(relays, lambda relay: relay.status().get("streams") == count, "everybody is linked")
        return relays

    def weights(self, name: str) -> bytes:
        """The weight map of a node that joined."""
        (path,) = (self.directory / f"state-{name}").glob("swarms/*/weights.bin")
        return path.read_bytes()

    def published(self) -> bytes:
        """The weight map of the Publisher."""
        return (self.directory / "publisher" / "versions" / "weights.bin").read_bytes()

    def _write(self, name: str, kind: type[BaseModel], settings: Mapping[str, object]) -> Path:
        path = self.directory / name
        path.write_text(as_toml(kind, settings))
        return path


def fetch_status(url: str) -> dict[str, Any]:
    """The status behind a URL; certificates are taken as they come."""
    context = ssl._create_unverified_context()
    with urllib.request.urlopen(url + "/v1/status", timeout=10, context=context) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@contextmanager
def swarm_in(directory: Path) -> Iterator[Swarm]:
    swarm = Swarm(directory)
    try:
        yield swarm
    finally:
        for node in swarm.nodes:
            node.end()


def is_complete(node: Node, version: str) -> bool:
    """Whether the node holds all of that version, applied."""
    return bool(node.status().get("map") == version)


def eventually(condition: Callable[[], Any], node: Node, what: str) -> None:
    """Poll until `condition` holds; what was waited for and the node's words if it never does."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"never came true: {what}\n{node.output()}"
        time.sleep(POLL_S)


def eventually_each(nodes: Iterable[N], condition: Callable[[N], Any], what: str) -> None:
    """The same of each of these nodes."""
    for node in nodes:
        eventually(lambda: condition(node), node, f"{node.name}: {what}")  # noqa: B023


def accepted_by(status: dict[str, Any]) -> dict[str, int]:
    """Accepted rollouts by sampler."""
    return {sampler["node"]: sampler["verdicts"].get("accepted", 0) for sampler in status["samplers"]}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line to its end in this process: what starts no node needs no start of its own."""
    out, err = io.StringIO(), io.StringIO()
    handler, umask = signal.getsignal(signal.SIGINT), os.umask(0o022)
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["echo-node", *arguments])
            with pytest.raises(SystemExit) as ended:
                run()
    finally:
        signal.signal(signal.SIGINT, handler)
        os.umask(umask)
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(arguments, ended.value.code, out.getvalue(), err.getvalue())


def run_command(
    *arguments: str, timeout_s: float = PATIENCE_S, module: str = "swarm"
) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line to its end in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def free_port() -> int:
    """Return a port that is free now. It lies below those that Linux gives to connections, since it may be bound only
    minutes later."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # Not from `random`: all workers of a test run have its seed
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
