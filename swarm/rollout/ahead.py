"""Makes training prompts ahead of time in a thread: one may take a second, and must not block the event loop.

Groups are opened in order of their numbers, and each takes the next prompts, so these are known. A request for leases
waits for all prompts that it may need (`has`), so the leases do not depend on how fast prompts are made.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from swarm.aio import Changes, in_thread
from swarm.types import Prompt

AT_ONCE_S = 0.1  # Time of one call in the thread: thousands of prompts of most tasks, one prompt of a slow task


class PromptsAhead:
    """Calls `make(number)` in a thread, for up to `most` groups ahead of the first that is opened, `first`. A group
    takes `per_group` prompts."""

    def __init__(self, make: Callable[[int], Prompt], *, first: int, most: int, per_group: int = 1) -> None:
        self._make = make
        self._per_group = per_group
        self._most = most * per_group
        self._next = first * per_group
        self._made: deque[Prompt] = deque()
        self._lock = threading.Lock()
        self._changes = Changes()
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """Let `run` begin to make prompts."""
        self._begun.set()

    def __call__(self, number: int) -> Prompt:
        """Return training prompt `number`: the next one or, from any thread, an earlier one. Block until it is made."""
        if number < self._next:
            return self._one(number)
        assert number == self._next
        self._next += 1
        prompt = self._made.popleft() if self._made else self._one(number)
        self._changes.tell()
        return prompt

    def has(self, groups: int) -> bool:
        """Return whether the prompts of the next `groups` (at most `most`) are made."""
        return len(self._made) >= min(groups * self._per_group, self._most)

    async def wait(self, timeout_s: float) -> None:
        """Return when more prompts are made, or after `timeout_s`."""
        await self._changes.wait(self._changes.count, timeout_s)

    async def run(self) -> None:
        """Make prompts until cancelled. Raise what `make` raises."""
        await self._begun.wait()
        while True:
            seen = self._changes.count
            if (room := self._most - len(self._made)) <= 0:
                await self._changes.wait(seen, None)
                continue
            begin = self._next + len(self._made)
            made = await in_thread(partial(self._some, begin, room))
            # Callers that did not wait may have made some of these prompts meanwhile.
            self._made.extend(made[self._next + len(self._made) - begin :])
            self._changes.tell()

    def _some(self, begin: int, most: int) -> list[Prompt]:
        made: list[Prompt] = []
        until = time.monotonic() + AT_ONCE_S
        while len(made) < most and (not made or time.monotonic() < until):
            made.append(self._one(begin + len(made)))
        return made

    def _one(self, number: int) -> Prompt:
        # A task need not support two calls at a time.
        with self._lock:
            return self._make(number)
