"""The threads that code, apply and hash whole versions: many seconds of work, less urgent than the network.

`in_thread` guarantees that no thread still writes into a directory after its node has left it. Receivers read and write
there through it only, and its caller does not end before the thread does.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

MIN_THREADS = 2  # Of any machine: they give way to the network
SPARED_CORES = 2  # Of a larger one: for the network's loop and for what draws or trains
MAX_THREADS = 16  # Past these the interpreter's lock and the memory bind
IN_HAND = 2 * MAX_THREADS  # Jobs begun and not yet taken: 128 MiB of encodings, whatever the size of the model

NICENESS = 10
"""If there are too few cores for everything, a thread of the network gets nine times the share of one of these."""


J = TypeVar("J")
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


def coding_pool(threads: int | None = None) -> ThreadPoolExecutor:
    """Return threads that give way to the network, of this process and of others: as many as the machine can spare,
    unless their number is given."""
    return ThreadPoolExecutor(threads or spare_threads(), thread_name_prefix="codec", initializer=_give_way)


def spare_threads() -> int:
    """Return how many threads may code at a time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(MIN_THREADS, min(MAX_THREADS, cores - SPARED_CORES))


def in_order(submit: Callable[[J], Future[T]], jobs: Iterable[J]) -> Generator[T]:
    """Yield what jobs give, in their order. At most IN_HAND are begun and not yet yielded: results take memory. If one
    fails, or the caller stops, those that were begun have ended when this does."""
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            waiting.append(submit(job))
            if len(waiting) >= IN_HAND:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            # The pool may be shutting down; concurrent.futures.wait would wait for a cancelled call for ever.
            with suppress(CancelledError):
                future.exception()


def _give_way() -> None:
    # On Linux niceness belongs to a thread; elsewhere to the process, which must not be slowed down.
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
