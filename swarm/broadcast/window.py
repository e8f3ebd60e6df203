"""How many chunks a relay wants to have under way: grows while it starves, shrinks while a queue stands."""

from __future__ import annotations

import math

STARVED = 0.3
"""Copies waiting per child when a chunk arrives, below which the relay could have had it sooner."""

STANDING = 3.0
STANDING_S = 0.03
"""A queue that was never shorter than so many chunks, nor than takes so long to send, in the last interval only
delays. It is looked at over time, not over arrivals: these come in bursts, and each burst makes a queue."""

LONGEST_S = 0.6
"""A window holds no more than a relay sends in this time: what waits longer cannot be dealt to a faster one."""


ENDING_S = 1.0
LAST_SHARE = 0.3
"""Near the end a window shrinks to this share of the time that is left: all queues are to be empty at once."""


class Window:
    """`out` is what was granted and has not arrived. Sizes in chunks per child."""

    def __init__(self, *, start: int, least: int, floor: int) -> None:
        self.size = start
        self.out = 0
        self._least = least
        self._floor = floor
        self._shortest = math.inf

    def arrived(self, waiting: float, backlog: float | None = None) -> None:
        """A chunk came while `waiting` copies of such chunks, and `backlog` of all, were queued per child."""
        self.out = max(0, self.out - 1)
        if (waiting if backlog is None else backlog) < STARVED:
            self.size += 1

    def grant(self, waiting: float, rate: float, left_s: float = math.inf) -> int:
        """How many more may come, with `rate` the chunks per second that each child is sent and `left_s` how long the
        transfer will still take."""
        self._shortest = min(self._shortest, waiting)
        self.size = min(self.size, max(self._floor, int(LONGEST_S * rate)))
        if left_s < ENDING_S:
            self.size = min(self.size, max(self._least, math.ceil(LAST_SHARE * left_s * rate)))
        more = max(0, math.ceil(self.size - waiting - self.out))
        self.out += more
        return more

    def settle(self, rate: float) -> None:
        """The end of an interval, every tick of the relay."""
        if self._shortest > max(STANDING, STANDING_S * rate) and self._shortest < math.inf:
            self.size = max(self._least, self.size - 1)
        self._shortest = math.inf
