"""What bin/netns-swarm says where it cannot work, and to what it does not understand."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.netns.script import main


@pytest.mark.parametrize(
    ("arguments", "user", "words"),
    [
        ([], 0, ""),
        (["exec", "1"], 0, ""),
        (["heal", "--", "ls"], 0, ""),
        (["up", "--hosts", "2"], 1000, "needs root"),
        (["up", "--hosts", "2"], 0, "needs `ip`; install iproute2"),
    ],
)
def test_bad_use_and_what_is_missing_are_one_line(
    arguments: list[str], user: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("netns-swarm: ")
    assert words in err
