"""The wheel in an environment of its own: a relay and commands without torch, and one line where torch is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.integration.processes import PATIENCE_S, Node, Swarm, eventually, is_complete

ROOT = Path(__file__).parents[2]
RELAY_BYTES = 100_000_000
"""Of a relay that holds the tiny model: what a Raspberry Pi has to spare."""


class Light:
    """An environment with the wheel and what it asks for, and nothing else."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wheel = self._build()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / "env"], check=True)
        self.bin = directory / "env" / "bin"

    def _build(self) -> Path:
        """From a copy, so that the checkout gets no build directory."""
        source = self.directory / "source"
        shutil.copytree(ROOT / "swarm", source / "swarm", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        self._pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(self.directory), f"{source}/")
        (wheel,) = self.directory.glob("echo_node-*.whl")
        return wheel

    def install_offline(self, extra: str = "") -> None:
        """The wheel itself, with links to what this environment has of the packages that it asks for, with `extra`."""
        self._pip("--python", str(self.bin / "python"), "install", "--no-deps", "--no-index", str(self.wheel))
        (site,) = (self.directory / "env").glob("lib/python3*/site-packages")
        (installed,) = site.glob("echo_node-*.dist-info")
        for needed in closure(Distribution.at(installed), extra).values():
            for name in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
                (site / name).symlink_to(Path(str(needed.locate_file(name))))

    def _pip(self, *arguments: str) -> None:
        quiet = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
        # Else pip finds the checkout, and has nothing to install.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            quiet, cwd=self.directory, env=kept, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return kept | {"HOME": str(self.directory / "home"), "OMP_NUM_THREADS": "1"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the installed command line, to its end."""
        return subprocess.run(
            [self.bin / "echo-node", *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


class LightNode(Node):
    """A node of that environment."""

    def __init__(self, light: Light, directory: Path, name: str, *arguments: str) -> None:
        words: list[str | Path] = [light.bin / "echo-node", *arguments]
        self._start(name, directory / f"{name}.log", words, where=light.directory, environment=light.environment)


def closure(root: Distribution, extra: str = "") -> dict[str, Distribution]:
    """What a package asks for with `extra`, which may name others of its own, and what that asks for without any."""
    found: dict[str, Distribution] = {}
    waiting = [(root, {"", extra})]
    while waiting:
        package, extras = waiting.pop()
        for wanted in map(Requirement, package.requires or ()):
            name = canonicalize_name(wanted.name)
            if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": one}) for one in extras):
                continue
            if name == "echo-node" and not wanted.extras <= extras:
                waiting.append((root, {"", *extras, *wanted.extras}))
            elif name not in found and name != "echo-node":
                found[name] = distribution(name)
                waiting.append((found[name], {""}))
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Light:
    made = Light(tmp_path_factory.mktemp("light"))
    made.install_offline()
    return made


def test_the_wheel_has_every_file_of_the_page(light: Light) -> None:
    static = ROOT / "swarm" / "dashboard" / "static"
    files = {str(path.relative_to(ROOT)) for path in static.rglob("*") if path.is_file()}
    assert {"swarm/dashboard/static/index.html", "swarm/dashboard/static/uplot/LICENSE"} < files
    with ZipFile(light.wheel) as wheel:
        assert {name for name in wheel.namelist() if "/static/" in name} == files


@pytest.mark.parametrize("arguments", [("lead", "--help"), ("tasks",), ("tasks", "try", "copy", "-n", "1")])
def test_the_command_line_needs_no_extra(light: Light, arguments: tuple[str, ...]) -> None:
    done = light.run(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("learner", ("lead", "--run-dir", "made", "--host", "127.0.0.1", "--port", "0")),
        ("learner", ("demo", "--run-dir", "made")),
        ("sampler", ("join", "--bootstrap", "127.0.0.1:1", "--state-dir", "made")),
        ("sampler", ("eval", "copy")),
    ],
)
def test_what_needs_an_extra_says_so_in_one_line_and_leaves_nothing(
    light: Light, extra: str, arguments: tuple[str, ...]
) -> None:
    done = light.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    for words in (f"the extra `{extra}`", f"pip install '.[{extra}]'", f"'FILE.whl[{extra}]'", "bin/setup"):
        assert words in done.stderr
    assert not (light.directory / "made").exists()
    assert not (light.directory / "home").exists()


def test_doctor_says_how_to_have_what_drawing_needs_and_finds_a_relay_well(light: Light) -> None:
    asked = ("doctor", "--json", "--state-dir", "made")
    drawing, relaying = light.run(*asked), light.run(*asked, "--role", "relay")
    assert (drawing.returncode, relaying.returncode) == (1, 0), drawing.stderr + relaying.stderr
    (finding,) = json.loads(drawing.stdout)["findings"]
    assert finding["about"] == "torch"
    assert finding["fix"].startswith("pip install '.[sampler]' in a checkout")
    assert "can relay, not draw" in finding["what"]
    assert json.loads(relaying.stdout)["findings"] == []
    assert not (light.directory / "made").exists()


def test_a_run_is_read_without_torch(light: Light, swarm: Swarm) -> None:
    learner = swarm.lead("--steps", "2", "--samplers", "1", "--port", "0")
    assert learner.process.wait(timeout=PATIENCE_S) == 0, learner.output()
    run = str(learner.run_dir)
    for words, said in (
        (("verify", run), "no rollout was too old, lost or used twice"),
        (("report", run), "report.html"),
        (("export", "rollouts", run, "--to", "rollouts.jsonl"), "rollouts in rollouts.jsonl"),
        (("export", "model", run, "--to", "model"), "the model of step 2 in model"),
        (("audit", run), "no node was caught"),
    ):
        done = light.run(*words)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    first = json.loads((light.directory / "rollouts.jsonl").read_text().splitlines()[0])
    assert first["prompt"]


@pytest.mark.long
def test_pipx_and_uvx_take_the_wheel(tmp_path: Path) -> None:
    light = Light(tmp_path)
    light._pip("--python", str(light.bin / "python"), "install", "pipx", "uv")
    own = {
        "PIPX_HOME": str(tmp_path / "pipx"),
        "PIPX_BIN_DIR": str(tmp_path / "bin"),
        "UV_CACHE_DIR": str(tmp_path / "uv"),
    }
    for words in (
        (str(light.bin / "pipx"), "install", "--quiet", str(light.wheel)),
        (str(tmp_path / "bin" / "echo-node"), "--version"),
        (str(light.bin / "uvx"), "--quiet", "--from", str(light.wheel), "echo-node", "--version"),
    ):
        done = subprocess.run(
            words, env=light.environment | own, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "--version" not in words or done.stdout.startswith("echo-node ")


@pytest.mark.slow
def test_a_relay_without_torch_takes_a_learners_weights_in_little_memory(
    light: Light, swarm: Swarm, tmp_path: Path
) -> None:
    """In the memory of a small machine, while the learner trains."""
    learner = swarm.lead("--port", "0")
    given = ("join", "--role", "relay", "--bootstrap", learner.url(), "--lan", "--port", "0")
    relay = LightNode(light, tmp_path, "relay", *given, "--state-dir", str(tmp_path / "state-relay"))
    swarm.nodes.append(relay)
    eventually(lambda: learner.status()["version"], learner, "a version")
    version = learner.status()["version"]
    eventually(lambda: is_complete(relay, version), relay, "the relay holds the weights")
    assert (used := psutil.Process(relay.process.pid).memory_info().rss) < RELAY_BYTES, used
