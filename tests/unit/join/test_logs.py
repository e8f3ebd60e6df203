"""node.log: what it keeps, how large it becomes, and how it is followed; and lines as JSON."""

from __future__ import annotations

import io
import json
import sys
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import Path

import pytest
from rich.console import Console

import swarm.cli.run as cli
from swarm.join import logs
from swarm.join.logs import ENGINE_NAME, NAME, TAIL_BYTES, TAIL_LINES, Lines, SaidLog, follow
from swarm.report.live import LiveView


def words(line: str | None) -> str:
    """A kept line without its time."""
    assert line is not None
    return line.split(" ", 2)[2]


def test_what_was_said_before_the_directory_was_known_is_kept_too(tmp_path: Path) -> None:
    said: list[str] = []
    log = SaidLog(said.append)
    log.say("first")
    log.open(tmp_path)
    log.say("second")
    assert log.keep("last") == "last"
    assert said == ["first", "second"]
    kept = (tmp_path / NAME).read_text().splitlines()
    assert [words(line) for line in kept] == ["first", "second", "last"]


def test_a_log_that_is_full_is_begun_again_and_followed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 100)
    log = SaidLog(lambda line: None)
    log.open(tmp_path)
    log.say("a" * 100)
    followed = follow(tmp_path)
    assert words(next(followed)) == "a" * 100
    assert next(followed) is None
    log.say("full")
    log.say("b")
    assert (tmp_path / NAME).stat().st_size < 100
    seen = list(takewhile(lambda line: line is not None, followed))
    assert [words(line) for line in seen] == ["b"]


def test_of_a_long_log_the_last_whole_lines_are_shown_and_the_engines_are_marked(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("x" * 2 * TAIL_BYTES + "\nlast\npart of a li")
    (tmp_path / ENGINE_NAME).write_text("".join(f"{at}\n" for at in range(100)))
    followed = follow(tmp_path)
    first = list(takewhile(lambda line: line is not None, followed))
    assert first[1] == "last"
    assert len(first) == 2 + TAIL_LINES
    assert first[-1] == "engine | 99"
    with (tmp_path / NAME).open("a") as file:
        file.write("ne\n")
    assert next(followed) == "part of a line"


def test_a_directory_that_cannot_be_written_to_stops_nobody(tmp_path: Path) -> None:
    said: list[str] = []
    log = SaidLog(said.append)
    log.open(tmp_path / "gone")
    log.say("still here")
    assert said == ["still here"]


# -- as JSON -----------------------------------------------------------------------------------------------------------

EVIL = 'evil"} \x1b[2J \u202e {"level": "error"\n'


def of_a_sampler() -> Lines:
    lines = Lines()
    lines.role, lines.status = "sampler", lambda: {"node": "ab12"}
    return lines


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("the model has 3 parameters", "info"),
        ("step 7: alarm entropy (0.1, limit 0.2): it fell", "info"),
        ("paused: by its owner", "info"),
        (EVIL, "info"),
    ],
)
def test_a_line_as_json_is_one_object_whatever_is_in_it(words: str, level: str) -> None:
    line = of_a_sampler().of(words)
    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line)
    assert datetime.fromisoformat(told.pop("time")).utcoffset() == timedelta(0)
    assert told == {"level": level, "role": "sampler", "node": "ab12", "message": words}


def test_a_node_that_has_no_key_yet_has_no_name_either_and_later_keeps_it() -> None:
    lines, known = of_a_sampler(), [None, {"node": "ab12"}, None]
    lines.status = lambda: known.pop(0)
    assert [json.loads(lines.of("x"))["node"] for _ in range(3)] == ["", "ab12", "ab12"]


def test_lines_as_json_leave_no_room_for_a_panel() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert LiveView(Console(file=Terminal()), title="").is_live
    view = LiveView(Console(file=(shown := Terminal())), title="", lines=of_a_sampler())
    assert not view.is_live
    view.say("x")
    assert json.loads(shown.getvalue())["message"] == "x"


def test_what_ends_a_node_is_an_error_in_json_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_lines", Lines())
    given = ["lead", "--log-format", "json", "--model", str(tmp_path / "nothing"), "--task", "copy"]
    monkeypatch.setattr(sys, "argv", ["echo-node", *given, "--run-dir", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        cli.run()
    assert ended.value.code == cli.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["role"]) == ("error", "learner")
    assert str(tmp_path / "nothing") in told["message"]
