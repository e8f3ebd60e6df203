"""The command line itself: its help, its options, what a wrong one is told."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from swarm import __version__
from swarm.cli import run as cli
from swarm.cli.run import app, run_to_end
from swarm.errors import UserError
from swarm.lead.dials import DIALS
from swarm.run.directory import create_run_directory
from swarm.settings import Flag, JoinConfig, LeadConfig, headings, sections

Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["echo-node", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def commands(group: Any = None, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    group = group or get_command(app)
    yield names, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *names, name)


@pytest.mark.parametrize("columns", ["60", "80"])
def test_help_cuts_no_name_of_an_option(monkeypatch: pytest.MonkeyPatch, run: Run, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for names, command in commands():
        status, help_text, _ = run(*names, "-h")
        assert status == 0
        assert help_text.startswith(" ".join(["Usage: echo-node", *names]))
        assert "…" not in help_text
        assert max(map(len, help_text.splitlines())) <= int(columns)
        options = [name for one in command.params if not getattr(one, "hidden", False) for name in one.opts]
        assert {name for name in options if name.startswith("--")} <= set(help_text.replace(",", "").split())


@pytest.mark.parametrize(("name", "kind"), [("lead", LeadConfig), ("join", JoinConfig)])
def test_every_flag_is_an_option_of_its_block(monkeypatch: pytest.MonkeyPatch, run: Run, name: str, kind: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, help_text, _ = run(name, "--help")
    blocks, titles = help_text.split("\n\n"), headings(kind)
    for field, info in kind.model_fields.items():
        flag = next((one for one in info.metadata if isinstance(one, Flag)), None)
        option = f"--{(flag and flag.name) or field.replace('_', '-')}"
        found = [block.splitlines()[0].rstrip(":") for block in blocks if re.search(rf"  {option}[ ,]", block)]
        assert found == ([titles[sections(kind)[field]]] if flag else []), field
    shown = [block.splitlines()[0].rstrip(":") for block in blocks]
    assert [title for title in shown if title.startswith("[")] == [one for one in titles.values() if one in shown]
    assert shown[-1].strip().startswith("Examples") or "Examples" in blocks[-1]


def test_defaults_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, help_text, _ = run("lead", "--help")
    assert f"Default: {LeadConfig.model_fields['steps'].default}." in help_text
    assert "Default: the task's." in help_text
    assert "--activate <all|cheapest>" in help_text


def test_flags_reach_the_settings_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def load(kind: Any, file: Path | None, flags: dict[str, Any]) -> Any:
        given.append((kind, file, flags))
        raise UserError("enough")

    monkeypatch.setattr(cli, "load_config", load)
    words = ["--steps", "7", "--no-chat", "--rewards", "exact=1", "--rewards", "math", "--temperature", "2"]
    with pytest.raises(UserError):
        app(["lead", *words], standalone_mode=False)
    flags = {"steps": "7", "chat": False, "rewards": ["exact=1", "math"], "temperature": "2"}
    assert given == [(LeadConfig, None, flags)]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("leed",), "No such command 'leed'. Did you mean 'lead', 'leave'?"),
        (("lead", "--max_staleness", "1"), "No such option: --max_staleness: did you mean --max-staleness?"),
        (("lead", "--stepz", "3"), "No such option: --stepz: did you mean --step or --steps?"),
        (
            ("lead", "--warmup-steps", "3"),
            "No such option: --warmup-steps: write warmup_steps = ... in a TOML file and name that with --config",
        ),
    ],
)
def test_a_typo_is_told_what_was_probably_meant(run: Run, arguments: tuple[str, ...], line: str) -> None:
    assert run(*arguments) == (2, "", f"echo-node: {line}\n")


def test_the_version_is_told(run: Run) -> None:
    assert run("--version") == (0, f"echo-node {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((".", "max_staleness=3"), "no learner runs in .: "),
        (("max-staleness=many",), "max_staleness many: input should be "),
        (("max-staleness", "4"), "write KEY=VALUE, "),
        (("runs/x",), "there is no directory runs/x"),
        (("runs/x", "paused=true", "stop"), "write KEY=VALUE, "),
    ],
)
def test_what_cannot_be_set_is_one_line(run: Run, words: tuple[str, ...], line: str) -> None:
    status, _, said = run("set", *words)
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith(f"echo-node: {line}")


def test_the_help_of_set_names_all_that_can_be_set(run: Run) -> None:
    _, help_text, _ = run("set", "-h")
    assert [key for key in DIALS if f"{key}: " not in help_text] == []


def test_the_shell_completes_commands_options_and_values() -> None:
    """Through the installed command's own entry, which loads no model library for it."""
    program = (
        "import sys; from swarm.__main__ import main\n"
        "try: main()\n"
        "finally: print('heavy:', *sorted({'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )

    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_ECHO_NODE_COMPLETE": "complete_bash"}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **words}, capture_output=True, text=True, check=False
        )
        assert done.stderr == "heavy:\n"
        return done.stdout.split()

    assert completed("echo-node le") == ["lead", "leave"]
    assert completed("echo-node lead --max-st") == ["--max-staleness"]
    assert completed("echo-node lead --activate ch") == ["cheapest"]


def test_the_page_of_a_run_is_named_or_is_off(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    create_run_directory(run_dir, LeadConfig(run_dir=run_dir))
    monkeypatch.setattr("swarm.node.control.is_served", lambda directory: True)
    address = run_dir / "dashboard.json"
    address.write_text('{"url": "http://127.0.0.1:7", "token": "t"}')
    assert run("dashboard", str(run_dir))[:2] == (0, "page http://127.0.0.1:7/?token=t\n")
    address.write_text('{"url": "", "token": "t"}')
    status, _, said = run("dashboard", str(run_dir))
    assert (status, said) == (2, f"echo-node: the run in {run_dir} is led now, without a page (--dashboard off)\n")


def test_what_a_node_and_its_children_write_is_for_its_user_alone(tmp_path: Path) -> None:
    """Its journal, its checkpoints and its logs too, which libraries open."""

    async def write() -> None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "learner.log").touch()
        with closing(sqlite3.connect(tmp_path / "journal.db")) as journal:
            journal.execute("CREATE TABLE t (x)")
        await (await asyncio.create_subprocess_exec("touch", str(tmp_path / "engine.log"))).wait()

    before = os.umask(0)
    try:
        run_to_end(write())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")} == {0}
