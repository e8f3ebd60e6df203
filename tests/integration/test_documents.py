"""README.md, docs/guide.md and docs/operations.md: every block of commands runs as it is written, in a clean clone.

A command runs to its end and exits with 0. `lead` and `join` run beside what follows: a new `lead` ends the one before
by Ctrl-C, and with it the samplers, unless it resumes the run that they wait for. What cannot run as it stands is in a
table with its reason, and a test fails if the documents do not have it any more.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from swarm.settings import JoinConfig, LeadConfig
from swarm.settings_file import load_config
from tests.integration.processes import PATIENCE_S, Node, eventually, free_port

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/guide.md", "docs/operations.md")
RESULTS = "benchmarks/RESULTS.md"

CONTAINERS = (
    "docker build --tag echo-node .",
    "docker run -d --init -p 7700:7700 -v echo-node:/state echo-node join --role relay --bootstrap HOST",
    "docker build --tag echo-node-gpu --build-arg EXTRAS=vllm .",
    "docker run -d --init --gpus all --shm-size 16g -v echo-node:/state echo-node-gpu join --bootstrap HOST",
)

JUDGED = [f"bin/echo-node {word} questions.jsonl --model M --reward judge.py:score" for word in ("lead", "eval")]

NOT_RUN = {
    "bin/demo": "tests/integration/test_demo.py runs it",
    "bin/test": "this is a part of it",
    **dict.fromkeys(JUDGED, "test_alone.py runs their like"),
    "python3 -m venv echo && . echo/bin/activate": "what follows would download gigabytes into it",
    "pip install '.[vllm]'": "downloads gigabytes",
    "systemctl --user daemon-reload": "needs a systemd that runs",
    "systemctl --user enable --now echo-node.service": "needs a systemd that runs",
    "loginctl enable-linger": "needs a systemd that runs",
    **dict.fromkeys(CONTAINERS, "needs a container engine"),
    "nvidia-smi --query-gpu=name,compute_cap --format=csv": "needs a GPU",
    "bin/echo-node plan examples/lab-4b.toml": "tests/integration/test_plan.py runs it",
    "bin/echo-node simulate examples/lab-4b.toml --seed 1 --hours 6": "test_simulate.py runs its like",
}
REPLACED = {
    "<this repository>": "the checkout that is tested",
    "--trainer-ranks 4": "four processes importing torch; tests/integration/test_two_ranks.py has two",
    "--role relay": "on a machine of its own its port would be free",
    "7700": "somebody may listen there",
    "echo1:...": "the line that the learner printed",
    "HOST": "the learner's machine",
    "PORT": "of the node that joined last",
    "RUN_DIR": "a run with a checkpoint",
    "DIR": "any name",
    "FILE": "any name",
}
"""What stands for something else, or has to differ here."""

QUESTIONS = {
    '"Qwen/Qwen3-0.6B"': '"./examples/arithmetic"',
    "max_new_tokens = 512": "max_new_tokens = 12",
    "eval_prompts = 200": "eval_prompts = 200\n\n[run]\ncheckpoint_every_steps = 1",
}
"""examples/questions.toml, with a small model that is here instead of one that has to be downloaded, and with something
to export after the first step."""

TAKE_STEPS = ("runs/first", "runs/q")
"""Runs whose learner is seen to take a step with its samplers. Of the others the learner starts and its nodes join:
each process that imports torch takes seconds."""

LEARNS_S = 3600.0
"""Longest wait for the arithmetic example: ten minutes on two quiet cores."""


def blocks(document: str) -> list[str]:
    """The indented blocks, without their indentation."""
    found = re.findall(r"(?:(?<=\n\n)|(?<=\n\n)\n)((?:    .*\n)+)", (ROOT / document).read_text())
    return ["".join(line[4:] for line in block.splitlines(keepends=True)) for block in found]


def is_settings(block: str) -> bool:
    return re.match(r"# \w+\.toml\n", block) is not None


def commands(document: str) -> list[str]:
    """As they are written, without the remarks behind them."""
    lines = [line for block in blocks(document) if not is_settings(block) for line in block.splitlines()]
    return [re.sub(r"\s+# .*", "", line) for line in lines]


class Shell(Node):
    """A command line at work."""

    def __init__(self, command: str, log: Path, *, place: Path, environment: dict[str, str]) -> None:
        self._start(command, log, ["bash", "-c", f"exec {command}"], where=place, environment=environment)


class Stranger:
    """Somebody who has a clone and types what the documents say."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._clone = directory / "echo-node"
        self._port = free_port()
        self._learner: Shell | None = None
        self._joined: list[Shell] = []
        self._count = 0
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XDG_STATE_HOME")}
        self._environment = kept | {
            "HOME": str(directory),
            # `echo-node`, as whoever installed the package calls it, is the clone's.
            "PATH": f"{self._clone / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def types(self, command: str) -> None:
        """Run what a command says, or its like; it has done what it is there for when this returns."""
        if command.startswith("git clone "):
            self._run(self._filled_in(command), self._directory)
            self._bring_up_to_date()
        elif re.match(r"(bin/)?echo-node lead\b", command):
            self._lead(command)
        elif re.match(r"(bin/)?echo-node join\b", command):
            self._join(command)
        elif re.match(r"(bin/)?echo-node dashboard\b", command):
            page = self._start(command)
            eventually(lambda: page.says("page http://127.0.0.1:"), page, "it says where the page is")
            page.end()
        else:
            self._run(self._filled_in(command), self._clone)

    def end(self) -> None:
        for node in (*self._joined, *([self._learner] if self._learner else [])):
            node.end()

    def learns(self) -> None:
        """Until the run has reached its target."""
        assert self._learner is not None
        status = self._learner.process.wait(LEARNS_S)
        assert status == 0, self._learner.output()

    def steps(self) -> int:
        """That the run has taken."""
        path = self._clone / self._run_dir() / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def _lead(self, command: str) -> None:
        resumes = "--resume" in command
        ending = ([self._learner] if self._learner else []) + ([] if resumes else self._joined)
        for node in ending:
            node.signal(signal.SIGINT)
        for node in ending:
            assert node.wait() in (0, 130), f"{node.name}\n{node.output()}"
        if not resumes:
            self._joined.clear()
        # Tests listen on loopback alone, where TLS has to be asked for.
        here = "" if resumes else f" --host 127.0.0.1 --tls --port {self._port}"
        learner = self._learner = self._start(command + here)
        eventually(lambda: self._alive(learner).says("a sampler joins with:"), learner, "a join line")
        if resumes and self._run_dir() == "runs/first":
            # `set` wants a learner that has started.
            self._take_a_step()

    def _join(self, command: str) -> None:
        node = self._start(command)
        self._joined.append(node)
        eventually(lambda: self._alive(node).says("; status: echo-node status "), node, "it listens")
        if self._run_dir() in TAKE_STEPS:
            self._take_a_step()

    def _take_a_step(self) -> None:
        """The learner takes one more with its samplers, and has measured a version."""
        assert self._learner is not None
        before, learner = self.steps(), self._learner
        run_dir = self._clone / self._run_dir()
        eventually(lambda: self._alive(learner) and self.steps() > before, learner, "a step")
        eventually((run_dir / "best").exists, learner, "a version is measured")
        if run_dir.name == "q":
            eventually(lambda: any(run_dir.glob("checkpoints/step-*")), learner, "a checkpoint")

    def _alive(self, node: Shell) -> Shell:
        assert node.process.poll() is None, f"{node.name}\n{node.output()}"
        return node

    def _run_dir(self) -> str:
        assert self._learner is not None
        found: list[str] = re.findall(r"run directory (\S+)", self._learner.output())
        return found[0]

    def _filled_in(self, command: str) -> str:
        """With what REPLACED says in place of what stands for it."""
        command = command.replace("<this repository>", str(ROOT))
        command = command.replace("--trainer-ranks 4", "--trainer-ranks 1").replace(
            "--role relay", "--role relay --port 0"
        )
        command = command.replace("7700", str(self._port)).replace("HOST", "127.0.0.1")
        if self._learner is not None:
            line = re.findall(r"--bootstrap (\S+)", self._learner.output())[0]
            command = command.replace("echo1:...", line).replace("RUN_DIR", "runs/q")
        if "PORT" in command:
            command = command.replace("PORT", self._joined[-1].address().rpartition(":")[2])
        return command.replace("DIR", "a-directory").replace("FILE", "a-file")

    def _start(self, command: str) -> Shell:
        self._count += 1
        log = self._directory / f"{self._count}.log"
        return Shell(self._filled_in(command), log, place=self._clone, environment=self._environment)

    def _run(self, command: str, place: Path) -> None:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=place,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def _bring_up_to_date(self) -> None:
        """What is not committed yet, the environment, so that nothing is installed, and the small model's settings."""
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        shutil.rmtree(self._clone / ".git")
        for name in filter(None, listed.stdout.split("\0")):
            there = self._clone / name
            there.unlink(missing_ok=True)
            if (ROOT / name).is_file():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, there)
        (self._clone / ".venv").symlink_to((ROOT / ".venv").resolve())
        settings = self._clone / "examples" / "questions.toml"
        text = settings.read_text()
        for written, instead in QUESTIONS.items():
            assert written in text, f"examples/questions.toml has no {written}"
            text = text.replace(written, instead)
        settings.write_text(text)


@contextmanager
def stranger_in(directory: Path) -> Iterator[Stranger]:
    """A stranger with nothing yet; whatever it started is ended."""
    stranger = Stranger(directory)
    try:
        yield stranger
    finally:
        stranger.end()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "documents",
    [
        pytest.param(DOCUMENTS[:1], id="README", marks=pytest.mark.slow),
        pytest.param(DOCUMENTS, id="all", marks=pytest.mark.long),
    ],
)
def test_every_command_runs_as_written(documents: tuple[str, ...], tmp_path: Path) -> None:
    """The other documents go on with what README.md has cloned."""
    with stranger_in(tmp_path) as stranger:
        for document in documents:
            for command in commands(document):
                if command not in NOT_RUN:
                    stranger.types(command)


@pytest.mark.long
@pytest.mark.timeout(LEARNS_S + 300)
def test_the_arithmetic_example_learns(tmp_path: Path) -> None:
    with stranger_in(tmp_path) as stranger:
        clone, *others = commands("README.md")
        stranger.types(clone)
        # One command, which runs a sampler itself.
        stranger.types(next(one for one in others if one == "bin/echo-node lead --config examples/arithmetic.toml"))
        stranger.learns()


def test_the_documents_begin_with_a_clone_and_have_what_the_tables_name() -> None:
    found = [command for document in DOCUMENTS for command in commands(document)]
    assert len(found) >= 30
    assert found[0] == "git clone <this repository> echo-node && cd echo-node"
    assert [command for command in NOT_RUN if command not in found] == []
    assert [words for words in REPLACED if not any(words in command for command in found)] == []


def test_settings_in_the_documents_are_settings(tmp_path: Path) -> None:
    found = [block for document in DOCUMENTS for block in blocks(document) if is_settings(block)]
    assert found
    for block in found:
        kind = LeadConfig if block.startswith("# lead.toml") else JoinConfig
        (tmp_path / "written.toml").write_text(block)
        load_config(kind, tmp_path / "written.toml", {})


def test_a_benchmark_that_a_document_names_is_there_and_runs_through_bin(tmp_path: Path) -> None:
    written = "".join(path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / RESULTS))
    found = re.findall(r"(\S*)python -m ((?:benchmarks|swarm|tests)[\w.]*)", written)
    assert len(found) > 30
    assert {module for _, module in found if find_spec(module) is None} == set()
    assert {place.lstrip("`(") for place, _ in found} == {"bin/"}
    asked = [str(ROOT / "bin" / "python"), "-m", "benchmarks.gossip", "--help"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
