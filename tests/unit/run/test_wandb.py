"""Figures for wandb, by its own client, which sends nothing: WANDB_MODE=offline."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.node.hello import what_is_learned
from swarm.run import log as module
from swarm.run.log import RunLog
from swarm.settings import LeadConfig


def _live(run_dir: Path, step: int) -> None:
    own: dict[str, Any] = {"task": "jsonl:/secret/q.jsonl", "rewards": {"/secret/judge.py:score": 1.0}}
    with closing(
        RunLog(run_dir, wandb=what_is_learned(LeadConfig(**own, state_dir=Path("/secret"), learning_rate=0.125)))
    ) as log:
        print("page http://127.0.0.1:1/?token=hidden")
        log.event("evaluated", version=step - 1, exact_match=0.5)
        log.metrics({"step": step, "time": 1.0, "reward": 0.25})


def test_two_lives_are_one_run_there_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        _live(tmp_path, step)
    known = (tmp_path / "wandb.id").read_text()
    lives = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    # Two lives in one second have a number behind their names.
    assert {re.sub(r"(offline-run-\w+-|-\d$)", "", path.parent.name) for path in lives} == {known}
    content = b"".join(path.read_bytes() for path in lives)
    for name in (b"train/reward", b"eval/exact_match", b"learning_rate", b"0.125"):
        assert name in content
    written = content + b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*.log"))
    assert b"judge.py:score" in written
    # Neither places on this machine nor what is printed, such as the token of the page.
    assert not [word for word in (b"/secret", b"token=hidden") if word in content]


def test_a_client_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *_: object) -> None:
            pass

        def add(self, line: object) -> None:
            raise ConnectionResetError("its process is gone")

        close = add

    monkeypatch.setattr(module, "WandbRun", Broken)
    with closing(RunLog(tmp_path, wandb={})) as log:
        log.metrics({"step": 1, "time": 1.0, "reward": 0.25})
        log.metrics({"step": 2, "time": 2.0, "reward": 0.5})
    kinds = [json.loads(line)["kind"] for line in (tmp_path / module.EVENTS).read_text().splitlines()]
    assert kinds == ["wandb_failed"]


def test_without_the_package_one_line_says_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--wandb needs the package: pip install '\.\[wandb\]'"):
        RunLog(tmp_path, wandb={})


def test_nothing_is_sent_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert not LeadConfig().wandb
    with closing(RunLog(tmp_path)) as log:
        log.metrics({"step": 1, "time": 1.0, "reward": 0.25})
    assert not (tmp_path / "wandb").exists()
