"""`service install`: the unit that it writes, as systemd reads it, and what it refuses to write."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import PATIENCE_S, command

JOINS = ("--bootstrap", "host", "--role", "relay", "--grace", "40", "--no-lan", "--nickname", 'Bob\'s "5%" $HOME \\o/')


class Home:
    """The directories of a user."""

    def __init__(self, directory: Path) -> None:
        self.state, self.unit = directory / "a state", directory / "config" / "systemd" / "user" / "echo-node.service"

    def settings(self) -> configparser.SectionProxy:
        found = configparser.RawConfigParser()
        found.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys are what they are
        found.read_string(self.unit.read_text())
        return found["Service"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = Home(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home.state))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return home


def test_the_unit_runs_join_with_just_those_arguments_and_may_write_its_state_alone(home: Home) -> None:
    done = command("service", "install", "--", *JOINS)
    assert done.returncode == 0, done.stderr
    assert "systemctl --user enable --now echo-node.service" in done.stdout
    assert "loginctl enable-linger" in done.stdout
    settings = home.settings()
    written = settings["ExecStart"].replace("%%", "%").replace("$$", "$")
    assert shlex.split(written) == [sys.executable, "-P", "-m", "swarm", "join", *JOINS]
    assert settings["ReadWritePaths"].startswith(f'"{home.state}/echo-node"')
    assert home.state.is_dir()
    wanted = {
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "PrivateUsers": "yes",
        "PrivateTmp": "yes",
        "KillSignal": "SIGTERM",
        "Restart": "on-failure",
        "RestartPreventExitStatus": "2",
        "TimeoutStopSec": "60",
    }
    assert {name: settings[name] for name in wanted} == wanted
    assert "StartLimitBurst=5" in home.unit.read_text()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here; what the unit says was right")
    verify = ["systemd-analyze", "--user", "verify", str(home.unit)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--bootstrap has to be given"),
        (("--bootstrap", "echo1:abc"), "copy the whole line"),
        (("--bootstrap", "host", "--base", "a\nb"), "not printable"),
    ],
)
def test_what_join_would_refuse_is_refused_before_anything_is_written(
    home: Home, arguments: tuple[str, ...], words: str
) -> None:
    done = command("service", "install", "--", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert not home.unit.exists()


def test_remove_leaves_nothing_that_would_start(home: Home) -> None:
    command("service", "install", "--", *JOINS)
    enabled = home.unit.parent / "default.target.wants" / home.unit.name
    enabled.parent.mkdir()
    enabled.symlink_to(home.unit)
    done = command("service", "remove")
    assert done.returncode == 0, done.stderr
    assert "systemctl --user stop echo-node.service" in done.stdout
    assert [path for path in home.unit.parent.rglob("*") if path.is_symlink() or path.is_file()] == []
    assert "nothing to remove" in command("service", "remove").stderr
