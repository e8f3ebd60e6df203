"""The Dockerfile's steps one by one, where no base image and no container engine is to be had: in a root that
debootstrap makes, with Debian's own Python in place of the image's, by chroot as root. Layers, the network and limits
of a container are not shown by this."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
STEPS: list[tuple[str, str]] = re.findall("^([A-Z]+) +(.*)$", TEXT, re.MULTILINE)
SUITE, WITH = "bookworm", "python3,python3-venv,ca-certificates"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
MAKE_S = 900.0  # For a root of 300 MB, or for a step

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3 * MAKE_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root"),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="debootstrap is not installed"),
]


class Container:
    """A root in which the steps of the Dockerfile are carried out, with `extras` as the build's argument."""

    def __init__(self, root: Path, extras: str) -> None:
        self.root, self._extras = root, extras
        self._variables: dict[str, str] = {}
        self._user, self._place = 0, "/"
        self.entrypoint: list[str] = []

    def build(self) -> None:
        for step, rest in STEPS:
            match step:
                case "RUN":
                    done = self.run("sh", "-c", rest, EXTRAS=self._extras)
                    assert done.returncode == 0, f"{rest}\n{done.stdout}\n{done.stderr}"
                case "COPY" if "--from=" not in rest:  # Both stages share this root
                    *names, to = rest.split()
                    for name in names:
                        self._copy(ROOT / name, self._inside(to))
                case "WORKDIR":
                    self._place = rest
                    self._inside(rest).mkdir(parents=True, exist_ok=True)
                case "USER":
                    self._user = int(rest)
                case "ENV":
                    self._variables.update(part.partition("=")[::2] for part in shlex.split(rest))
                case "ENTRYPOINT":
                    self.entrypoint = json.loads(rest)
                case "FROM" | "ARG" | "VOLUME" | "EXPOSE" | "STOPSIGNAL" | "CMD" | "COPY":
                    pass
                case other:
                    raise AssertionError(f"nothing here knows the step {other}")

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command inside, as the user and in the directory that hold now."""
        known = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin", "HOME": "/root" if not self._user else "/state"}
        prefixes = ("PIP_", "HTTP", "http", "NO_PROXY", "no_proxy", "SSL_CERT")
        given = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
        inside = ("sh", "-c", f'cd {self._place}; exec "$@"', "sh", *words)
        return subprocess.run(
            ["chroot", f"--userspec={self._user}:{self._user}", self.root, *inside],
            env={**known, **given, **self._variables, **variables},
            capture_output=True,
            text=True,
            timeout=MAKE_S,
            check=False,
        )

    def _inside(self, path: str) -> Path:
        return self.root / os.path.normpath(os.path.join(self._place, path)).lstrip("/")

    @staticmethod
    def _copy(source: Path, to: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / source.name if to.is_dir() else to)


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Path]:
    """Debian with a Python that is called as in the image, and with this machine's way to the package index."""
    root = tmp_path / "root"
    made = ["debootstrap", "--variant=minbase", f"--include={WITH}", SUITE, str(root)]
    subprocess.run(made, check=True, capture_output=True, timeout=MAKE_S)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    for name in ("/etc/resolv.conf", "/etc/pip.conf", CERTIFICATES, os.environ.get("PIP_CERT", CERTIFICATES)):
        if Path(name).exists():
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, root / name[1:])
    # Of torch the build for CPUs may be only there.
    for place in filter(os.path.isdir, os.environ.get("PIP_FIND_LINKS", "").split()):
        shutil.copytree(place, root / place.lstrip("/"))
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize("extras", ["", "sampler", "vllm"])
def test_its_steps_make_a_node_that_somebody_without_rights_runs(bare: Path, extras: str) -> None:
    """Light, with what draws on a CPU, and with vLLM, for GPUs, of which there is none here: doctor alone is asked."""
    container = Container(bare, extras)
    container.build()
    said = container.run(*container.entrypoint, "--version")
    assert said.stdout.startswith("echo-node "), said.stderr
    role = "sampler" if extras else "relay"
    found = container.run(*container.entrypoint, "doctor", "--role", role, "--json")
    assert json.loads(found.stdout)["findings"] == [], found.stdout + found.stderr
    assert container.run("id", "-u").stdout == "10001\n"
