"""Work that blocks, in a thread of its own that nobody waits for once it is given up.

What a user's task does may take as long as it likes: a stop must not wait for it, as it would for `asyncio.to_thread`,
whose threads are joined before the loop closes and again before the process ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

R = TypeVar("R")


async def in_thread(work: Callable[[], R]) -> R:
    """What `work` gives or raises. When this is cancelled, `work` goes on by itself until it or the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        # The loop may be closed by now.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where this is awaited
            fault = error
            settle(lambda: done.set_exception(fault))
        else:
            settle(lambda: done.set_result(found))

    threading.Thread(target=run, name="work", daemon=True).start()
    return await done
