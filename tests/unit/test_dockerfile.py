"""The Dockerfile: what a linter says of it, and that it copies what the installation needs. No engine runs it here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from swarm.extras import LIBRARIES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [line.split(maxsplit=1) for line in TEXT.replace("\\\n", " ").splitlines() if re.match("[A-Z]+ ", line)]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def of(name: str) -> list[str]:
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


@pytest.mark.skipif(shutil.which("hadolint", path=PATH) is None, reason="no hadolint here; .ci/run installs it")
def test_the_linter_finds_nothing() -> None:
    linting = ["hadolint", str(ROOT / "Dockerfile")]
    done = subprocess.run(linting, env={"PATH": PATH}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_as_nobody_in_particular_from_an_image_of_a_named_version() -> None:
    assert of("USER")[-1].isdigit()
    assert int(of("USER")[-1]) > 0
    assert all(re.fullmatch(r"python:3\.\d+-slim( AS build)?", image) for image in of("FROM"))
    assert of("ENTRYPOINT") == ['["/opt/echo-node/bin/echo-node"]']
    assert of("STOPSIGNAL") == ["SIGTERM"]


def test_without_an_argument_it_is_light_and_the_argument_names_extras_that_are_there() -> None:
    assert of("ARG") == ['EXTRAS=""']
    named = re.search(r"EXTRAS=(\w+) \(([\w, ]+)\)", TEXT)
    assert named is not None
    assert {named[1], *named[2].split(", ")} <= LIBRARIES.keys()


def test_what_the_installation_needs_is_copied_and_not_ignored() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "constraints.txt", "swarm", project["readme"], *project["license-files"]}
    copied = {name for line in of("COPY") if "--from" not in line for name in line.split()[:-1]}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert needed == copied == kept
    assert all((ROOT / name).exists() for name in needed)
