"""The threads that code, apply and hash whole versions: many seconds of work that may wait for the network."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

CODING_THREADS = 2
"""Regions coded at a time: two leave room for the network on a small machine."""

NICENESS = 10
"""Where there are too few cores for everything, a thread of the network has nine times the share of one of these."""


def coding_pool() -> ThreadPoolExecutor:
    """Threads that give way to the network, of this process and of others."""
    return ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="codec", initializer=_give_way)


def _give_way() -> None:
    # On Linux niceness is a thread's own; elsewhere it is the process's, which must not be slowed down.
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
