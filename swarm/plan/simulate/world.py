"""Virtual time: a heap of events, one source of randomness, and a digest of everything that happened.

Theory of operation. An event is (time, sequence number, label, callback). The sequence number runs simultaneous events
in the order in which they were scheduled, so that a run depends only on its seed. Each event writes its time and label
to the trace before it runs, and `note` adds its results. The trace is folded into a running BLAKE3: two runs are the
same if their digests are the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

from blake3 import blake3

Callback = Callable[[], None]


class World:
    """The clock and the coming events. `watch`, if set, is called after every event; `tell` gets trace lines."""

    def __init__(self, random: Random, *, tell: Callable[[str], None] | None = None) -> None:
        self.random = random
        self.now = 0.0
        self.events = 0
        self.watch: Callback | None = None
        self._tell = tell
        self._heap: list[tuple[float, int, str, Callback]] = []
        self._sequence = 0
        self._digest = blake3()

    def schedule(self, delay_s: float, label: str, callback: Callback) -> None:
        """Run `callback` `delay_s` from now."""
        assert delay_s >= 0
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, label, callback))

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now:.6f} {text}"
        self._digest.update(line.encode() + b"\n")
        if self._tell is not None:
            self._tell(line)

    def run_until(self, over: Callable[[], bool]) -> None:
        """Run events until `over` returns true or none is left."""
        while self._heap and not over():
            self.now, _, label, callback = heapq.heappop(self._heap)
            self.events += 1
            self.note(label)
            callback()
            if self.watch is not None:
                self.watch()

    def trace_digest(self) -> str:
        """Return the BLAKE3 of the trace so far, in hexadecimal."""
        return self._digest.hexdigest()
