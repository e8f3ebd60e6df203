"""control.sock: what is asked, answered, refused, and left behind."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.cli.runs import _the_running_one
from swarm.errors import UserError
from swarm.lead.steps import Steps
from swarm.node import control as control_module
from swarm.node.control import LINE_BYTES, SOCKET, ask_for, control, is_served
from swarm.rollout.journal.journal import JournalFailed
from tests.unit.report.test_terminal import early_learner


async def change(request: dict[str, Any]) -> str:
    match request:
        case {"max_staleness": int() as wanted}:
            return f"max-staleness is {wanted}"
        case {"fail": "user"}:
            raise UserError("no such thing")
        case {"fail": "disk"}:
            raise OSError(28, "No space left on device")
        case {"fail": "journal"}:
            raise JournalFailed("the journal cannot be written")
    raise AssertionError(request)


ASK = {"max_staleness": 1}


async def is_answered(run_dir: Path) -> bool:
    return await ask_for(run_dir, ASK) == "max-staleness is 1"


async def said(run_dir: Path, line: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(run_dir / SOCKET))
    writer.write(line)
    answer = await reader.read()
    writer.close()
    return answer


def left_socket(run_dir: Path) -> socket.socket:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(run_dir / SOCKET))
    return left


@pytest.mark.parametrize(
    ("fault", "line"), [("user", "no such thing"), ("disk", "No space left"), ("journal", "cannot be written")]
)
async def test_a_refusal_says_why(tmp_path: Path, fault: str, line: str) -> None:
    async with control(tmp_path, change):
        with pytest.raises(UserError, match=line):
            await ask_for(tmp_path, {"fail": fault})
        assert await is_answered(tmp_path)


async def test_what_is_no_request_does_no_harm(tmp_path: Path) -> None:
    async with control(tmp_path, change):
        assert b"one JSON object" in await said(tmp_path, b"[1]\n")
        assert await said(tmp_path, b"{\n") == b""
        assert await said(tmp_path, b"1" * 2 * LINE_BYTES + b"\n") == b""
        assert await is_answered(tmp_path)


async def test_only_its_owner_may_use_it_and_it_is_gone_afterwards(tmp_path: Path) -> None:
    async with control(tmp_path, change):
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
        assert is_served(tmp_path)
    assert not (tmp_path / SOCKET).exists()


async def test_a_path_longer_than_a_sockets_name(tmp_path: Path) -> None:
    run_dir = tmp_path / ("a" * 80) / ("b" * 80)
    run_dir.mkdir(parents=True)
    async with control(run_dir, change):
        assert await is_answered(run_dir)


async def test_who_does_not_answer_and_why_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that a killed learner left hinders nobody, and a learner that is slow is not said to be gone."""
    with pytest.raises(UserError, match="there is no directory"):
        await ask_for(tmp_path / "nowhere", ASK)
    with pytest.raises(UserError, match="no learner runs in"):
        await ask_for(tmp_path, ASK)
    with left_socket(tmp_path) as left:
        assert not is_served(tmp_path)
        with pytest.raises(UserError, match="no learner runs in"):
            await ask_for(tmp_path, ASK)
        left.listen()
        with monkeypatch.context() as short:
            short.setattr(control_module, "CALL_S", 0.05)
            with pytest.raises(UserError, match="did not answer within"):
                await ask_for(tmp_path, ASK)
    async with control(tmp_path, change):
        assert await is_answered(tmp_path)


async def test_the_one_learner_that_still_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    killed, running, other = Path("runs/killed"), Path("runs/running"), Path("runs/other")
    for run_dir in (killed, running, other):
        run_dir.mkdir(parents=True)
    left_socket(killed).close()
    with pytest.raises(UserError, match="no learners run under runs/ here"):
        _the_running_one()
    async with control(running, change):
        assert _the_running_one() == running
        async with control(other, change):
            with pytest.raises(UserError, match="2 learners run under runs/ here: name its run directory"):
                _the_running_one()


async def test_a_node_that_joined_goes_on_without_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(asyncio, "start_unix_server", refuse)
    told: list[OSError] = []
    async with control(tmp_path, change, told.append):
        assert not is_served(tmp_path)
    assert [error.errno for error in told] == [1]
    with pytest.raises(PermissionError):
        async with control(tmp_path, change):
            pass


class Changed:
    """The steps of a learner that runs."""

    is_paused = False

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, str]] = []

    async def change(self, key: str, value: Any, *, by: str) -> str:
        self.asked.append((key, value, by))
        return f"{key} is {value}"

    def request_stop(self) -> str:
        return "the end of step 4 and its checkpoint"


async def test_a_learner_is_changed_only_while_it_takes_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, steps = early_learner(tmp_path), Changed()
    with pytest.raises(UserError, match="the learner is starting: nothing can be changed now"):
        await node.change({"paused": "true"}, by="page")
    node._steps, node._state = cast(Steps, steps), "running"
    assert await node.change({"max-staleness": "3", "paused": True}, by="page") == "max_staleness is 3\npaused is True"
    assert steps.asked == [("max_staleness", 3, "page"), ("paused", True, "page")]
    with pytest.raises(UserError, match="that is the learner itself"):
        await node.change({"refuse": node._network.key.node_id}, by="socket")
    with monkeypatch.context() as full:
        full.setattr(node, "_fault", lambda: "the disk is full")
        with pytest.raises(UserError, match="the learner is paused: the disk is full"):
            await node.change({"paused": False}, by="socket")
    assert len(steps.asked) == 2
    assert await node.change({"stop": "after-step"}, by="socket") == "stop is after-step"
    assert (node.is_stopped, node._state) == (True, "stopping")
    with pytest.raises(UserError, match="the learner is stopping: nothing can be changed now"):
        await node.change({"paused": False}, by="socket")
