"""What a relay keeps of one link to another receiver."""

from __future__ import annotations

import math
from collections import deque

from swarm.broadcast.notes import Kind, Note, has_bit

Duty = list[int]
"""[index, sends left, 1 if it is a forward]: shared by the queue entries of one chunk."""


STALLED_QUEUE = 8
QUICK = 4.0
DEAD_SHARE = 0.1
"""One that gets under a tenth over a quarter of a second is stalled too: until it is set aside its queue holds up what
the relay is dealt, and everybody with it."""

STALLED_SHARE = 0.25
"""A child that has more waiting and gets under a quarter of the average rate is stalled: a moving average of a second
tells that from bad luck. A connection that only begins slowly gets more."""

KEPT_UP_TICKS = 3
"""A stalled child is offered half of the average rate; if it takes that for so many ticks it is stalled no more."""


class Child:
    """One link to another receiver."""

    __slots__ = (
        "arrivals", "asked", "busy", "complete", "deferred", "has", "kept_up", "leaf", "notes", "offered", "queue",
        "quick_rate", "rate", "sent", "stalled", "wanted",
    )  # fmt: skip

    def __init__(self, leaf: bool) -> None:
        self.leaf = leaf
        self.queue: deque[tuple[int, Kind, Duty | None]] = deque()
        self.deferred: deque[int] = deque()
        self.wanted: deque[int] = deque()
        self.notes: deque[Note] = deque()
        self.busy: Duty | None = None
        self.stalled = False
        self.offered = 0
        self.kept_up = 0
        self.arrivals = 0
        self.asked = 0
        self.complete = False
        self.has = bytearray()
        self.sent = 0
        self.rate = 0.0
        self.quick_rate = 0.0

    def holds(self, index: int) -> bool:
        return self.complete or has_bit(self.has, index)

    def note(self, index: int, nbytes: int) -> None:
        """It has chunk `index` of a version whose bitmaps have `nbytes`."""
        if len(self.has) < nbytes:
            self.has.extend(bytes(nbytes - len(self.has)))
        self.has[index >> 3] |= 1 << (index & 7)

    def measure(self, elapsed: float, weight: float) -> None:
        """Two moving averages of what it was sent: of a second, with `weight`, and of a quarter."""
        rate, self.sent = self.sent / elapsed, 0
        self.rate += weight * (rate - self.rate)
        self.quick_rate += min(1.0, QUICK * weight) * (rate - self.quick_rate)

    def is_stalling(self, fair: float) -> bool:
        """Whether its queue grows because it takes hardly anything, while others get `fair` on average."""
        slow = self.rate < STALLED_SHARE * fair or self.quick_rate < DEAD_SHARE * fair
        return slow and len(self.queue) > STALLED_QUEUE

    def offer(self, chunks: float) -> None:
        """While it is stalled: so much it may take until the next tick. Called every tick."""
        self.kept_up = self.kept_up + 1 if self.offered <= 0 or not self.deferred else 0
        self.offered = math.ceil(chunks)
        if self.kept_up > KEPT_UP_TICKS:
            self.stalled = False
