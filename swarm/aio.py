"""Helpers to wait: for a change, for work in a thread, or until a node is stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

R = TypeVar("R")


class Changes:
    """Wakes all tasks that wait for the next change, ordered by `rank`, then by arrival."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: dict[asyncio.Future[None], float] = {}

    def tell(self) -> None:
        """Announce a change."""
        self.count += 1
        for future in sorted(self._waiting, key=self._waiting.__getitem__):
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seen: int, seconds: float | None, *, rank: float = 0.0) -> None:
        """Return once `count` differs from `seen`, or after `seconds`."""
        if self.count != seen:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = rank
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await future
        finally:
            self._waiting.pop(future, None)


async def in_thread(work: Callable[[], R]) -> R:
    """Run `work` in a thread and return its result. If this is cancelled, the thread goes on until `work` or the
    process ends. Unlike a thread of `asyncio.to_thread`, neither the loop nor the process waits for it at its end, so
    a user's task that blocks does not delay a stop."""
    done: Future[R] = Future()
    # From now on a cancellation reaches only the awaiting task.
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where this is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="work", daemon=True).start()
    return await asyncio.wrap_future(done)


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, R] | asyncio.Future[R]) -> R | None:
    """Return the result of `work`. If `stop` is set first, cancel `work` and return None."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
