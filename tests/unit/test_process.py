"""Work in a thread that nobody waits for once it is given up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.aio import in_thread


def test_work_that_is_given_up_keeps_neither_who_waits_nor_the_loop() -> None:
    gate, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    async def give_up() -> None:
        task = asyncio.create_task(in_thread(work))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    (thread,) = [one for one in threading.enumerate() if one.name == "work"]
    assert thread.daemon, "the interpreter does not wait for it either"
    gate.set()
    thread.join()


async def test_what_work_gives_or_raises_is_had() -> None:
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
