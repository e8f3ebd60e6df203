"""node.log: what it keeps, how large it becomes, and how it is followed; and lines as JSON."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

from swarm.join import logs
from swarm.join.logs import ENGINE_NAME, NAME, TAIL_BYTES, TAIL_LINES, SaidLog, follow


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


def test_a_full_log_is_begun_again_and_still_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
