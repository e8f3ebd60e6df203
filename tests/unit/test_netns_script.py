"""What bin/netns-swarm says where it cannot work, and to what it does not understand."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.netns.script import main


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("netns-swarm: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["up"], ["up", "--hosts", "many"], ["exec", "1"], ["exec", "1", "ls"], ["heal", "--", "ls"]],
)
def test_bad_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    _said(capsys)


@pytest.mark.parametrize(("user", "words"), [(1000, "needs root"), (0, "needs `ip`; install iproute2")])
def test_what_is_missing_is_said(
    user: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert main(["up", "--hosts", "2"]) == 2
    assert words in _said(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--hosts", "0"], "1 to 250 hosts"), (["--hosts", "2", "--name", "A.b"], "a name is up to 40")],
)
def test_what_cannot_be_made(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("tests.netns.script.sweep", lambda: None)
    assert main(["up", *arguments]) == 2
    assert words in _said(capsys)
