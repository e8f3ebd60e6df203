"""A chat in a terminal: what is asked again, and what is forgotten."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.cli import chat as module
from swarm.cli.chat import ENDED_AT_ONCE, talk_with
from swarm.errors import UserError

Messages = list[dict[str, str]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[Messages]]:
    """Have a person say these lines, and return what the swarm was asked for each."""

    def run(*lines: str | type[BaseException], system: str | None = None) -> list[Messages]:
        asked: list[Messages] = []
        said: Iterator[str | type[BaseException]] = iter(lines)

        def say(prompt: str) -> str:
            line = next(said, EOFError)
            if isinstance(line, type):
                raise line
            return line

        def answer(run_dir: Path, messages: Messages) -> str:
            asked.append(messages)
            if messages[-1]["content"] == "fail":
                raise UserError("no sampler is there")
            return "" if messages[-1]["content"] == "hush" else f"to {messages[-1]['content']}"

        monkeypatch.setattr("builtins.input", say)
        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr(module, "_answer", answer)
        talk_with(Path("run"), None, system)
        return asked

    return run


def words(messages: Messages) -> list[str]:
    return [one["content"] for one in messages]


def test_a_chat_is_asked_with_what_was_said_before_but_not_before_a_reset(talk: Callable[..., list[Messages]]) -> None:
    first, second, third = talk("one", "", "two", "/reset", "three", system="short")
    assert first == [{"role": "system", "content": "short"}, {"role": "user", "content": "one"}]
    assert second == [*first, {"role": "assistant", "content": "to one"}, {"role": "user", "content": "two"}]
    assert words(third) == ["short", "three"]


def test_a_fault_is_left_out_of_a_chat(talk: Callable[..., list[Messages]], capsys: pytest.CaptureFixture[str]) -> None:
    *_, last = talk("one", "fail", "two")
    assert words(last) == ["one", "to one", "two"]
    assert capsys.readouterr().err == "echo-node: no sampler is there\n"


def test_ctrl_c_ends_a_chat(talk: Callable[..., list[Messages]]) -> None:
    assert len(talk("one", KeyboardInterrupt, "two")) == 1


def test_an_empty_answer_is_said(talk: Callable[..., list[Messages]], capsys: pytest.CaptureFixture[str]) -> None:
    _, last = talk("hush", "two")
    assert words(last) == ["hush", "", "two"]
    assert ENDED_AT_ONCE in capsys.readouterr().out.splitlines()
    talk_with(Path("run"), "hush", None)
    assert capsys.readouterr().out == f"{ENDED_AT_ONCE}\n"
