"""Child processes: answers, faults, a child that hangs, and one whose parent is gone."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from swarm.errors import ChildFailed, ChildHung, UserError
from swarm.process import MAX_LOG_BYTES, SOCKET_VARIABLE, Call, Child
from tests.integration.echo_child import Echo, Said

MODULE = "tests.integration.echo_child"
SIDE_BY_SIDE = "side by side"


async def started(directory: Path, *arguments: str, hang_s: float = 60.0) -> Child:
    child = Child("echo", MODULE, *arguments, log=directory / "echo.log", hang_s=hang_s)
    await child.start()
    return child


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[Child]:
    child = await started(tmp_path)
    yield child
    await child.stop()


@pytest.fixture
async def many(tmp_path: Path) -> AsyncIterator[Child]:
    """One that takes calls side by side."""
    child = await started(tmp_path, SIDE_BY_SIDE)
    yield child
    await child.stop()


async def test_a_fault_is_told_with_the_log_and_the_child_goes_on(child: Child) -> None:
    with pytest.raises(ChildFailed, match=r"RuntimeError: too hot.*echo.log"):
        await child.call(Echo(words="too hot", fault="any"), Said)
    with pytest.raises(UserError, match=r"^no such model$"):
        await child.call(Echo(words="no such model", fault="user"), Said)
    assert await child.call(Echo(words="still here"), Said) == Said("still here")


async def test_a_log_that_a_child_fills_is_begun_again(child: Child, tmp_path: Path) -> None:
    """A learner's model may make libraries print without end: that must not take an owner's disk."""
    log = tmp_path / "echo.log"
    with log.open("ab") as other:
        other.write(bytes(MAX_LOG_BYTES))
        other.flush()
        await child.call(Echo(words="a"), Said)
        assert log.stat().st_size == MAX_LOG_BYTES, "what fits stays"
        for words in "bc":
            other.write(b"one line more\n")
            other.flush()
            await child.call(Echo(words=words), Said)
    assert log.read_bytes() == b"one line more\n", "it goes on where it was cut"


def test_the_log_s_tail_has_what_a_process_of_the_child_s_said_before_the_child_s_own_traceback(tmp_path: Path) -> None:
    """As vLLM's core does, whose fault the front only refers to."""
    frames = "".join(f'  File "x.py", line {line}, in start\n    run()\n' for line in range(5))
    log = tmp_path / "echo.log"
    log.write_text(
        f"Process Core:\nTraceback (most recent call last):\n{frames}ValueError: too little memory\n"
        f"Traceback (most recent call last):\n{frames}RuntimeError: see above\n\n"
    )
    tail = Child("echo", MODULE, log=log, hang_s=60.0).log_tail()
    assert tail == f"Process Core: | ValueError: too little memory | RuntimeError: see above (log: {log})"


async def test_a_child_without_progress_is_killed(tmp_path: Path) -> None:
    child = await started(tmp_path, hang_s=0.2)
    with pytest.raises(ChildFailed, match="no progress"):
        await child.call(Echo(words="", hang=True), Said)
    with pytest.raises(ChildFailed, match="died"):
        await child.call(Echo(words=""), Said)


async def test_answers_of_other_calls_are_no_progress_of_one_that_hangs(tmp_path: Path) -> None:
    """Samples of an engine that hangs end by their time limits, more often than it may be silent."""
    child = await started(tmp_path, SIDE_BY_SIDE, hang_s=0.5)
    hanging = asyncio.ensure_future(child.call(Echo(words="", after="never"), Said))
    with suppress(ChildFailed):
        for _ in range(100):
            assert await child.call(Echo(words="given up"), Said)
            await asyncio.sleep(0.05)
    with pytest.raises(ChildFailed, match="no progress"):
        await asyncio.wait_for(hanging, 0.1)


async def test_all_calls_of_a_child_that_hangs_say_so(tmp_path: Path) -> None:
    """Of two calls the second was told that the child had died, and a sampler that its engine had."""
    child = await started(tmp_path, SIDE_BY_SIDE, hang_s=0.5)
    calls = (child.call(Echo(words=word, after="never"), Said) for word in "ab")
    faults = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(fault) for fault in faults] == [ChildHung] * 2


async def test_calls_side_by_side_get_their_own_answers_in_any_order(many: Child) -> None:
    slow = asyncio.ensure_future(many.call(Echo(words="slow", after="quick"), Said))
    assert await many.call(Echo(words="quick"), Said) == Said("quick")
    assert await slow == Said("slow")


async def test_all_calls_end_with_the_child(many: Child) -> None:
    calls = [asyncio.ensure_future(many.call(Echo(words=word, after="never"), Said)) for word in "ab"]
    assert await many.call(Echo(words="they have begun"), Said)
    assert many.pid is not None
    os.kill(many.pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(ChildFailed, match="died"):
            await call


@pytest.mark.parametrize("turns", range(6))
async def test_a_call_is_cancelled_at_whatever_moment(tmp_path: Path, turns: int) -> None:
    """Python 3.11's `asyncio.wait_for` loses a cancellation that comes as what it waits for is done: a learner told to
    stop as it sent a batch to its trainer trained on for ever."""
    child = await started(tmp_path, SIDE_BY_SIDE, hang_s=2.0)
    call = asyncio.ensure_future(child.call(Echo(words="", after="never"), Said))
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    child = Child("ghost", "tests.integration.no_such_module", log=tmp_path / "ghost.log", hang_s=1.0)
    with pytest.raises(ChildFailed, match=r"did not start.*no_such_module"):
        await child.start()


@pytest.mark.parametrize("unread", [False, True])
def test_a_child_ends_with_its_parent_even_with_an_answer_unread(tmp_path: Path, unread: bool) -> None:
    """A parent that is killed with an answer in its socket's buffer resets the connection instead of closing it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE], env={**os.environ, SOCKET_VARIABLE: str(tmp_path / "s")}
        )
        try:
            parent, _ = listener.accept()
            if unread:
                command = msgspec.Raw(msgspec.msgpack.encode(Echo(words="nobody reads this")))
                body = msgspec.msgpack.encode(Call(1, command))
                parent.sendall(struct.pack(">I", len(body)) + body)
                select.select([parent], [], [], 60)
            parent.close()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
