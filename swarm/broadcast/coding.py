"""The threads that code, apply and hash whole versions: many seconds of work, less urgent than the network.

`in_thread` guarantees that no thread still writes into a directory after its node has left it. Receivers read and write
there through it only, and its caller does not end before the thread does.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

CODING_THREADS = 2  # Regions coded at a time; two leave room for the network on a small machine

NICENESS = 10
"""If there are too few cores for everything, a thread of the network gets nine times the share of one of these."""


T = TypeVar("T")


async def in_thread(call: Callable[..., T], *arguments: object, pool: Executor | None = None) -> T:
    """Run `call` in a thread. If the caller is cancelled meanwhile, it waits for the thread to end: that cannot be
    stopped, and may be writing what another call opens next. A second cancellation does not wait."""
    future = asyncio.get_running_loop().run_in_executor(pool, partial(call, *arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def coding_pool() -> ThreadPoolExecutor:
    """Return threads that give way to the network, of this process and of others."""
    return ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="codec", initializer=_give_way)


def _give_way() -> None:
    # On Linux niceness belongs to a thread; elsewhere to the process, which must not be slowed down.
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
