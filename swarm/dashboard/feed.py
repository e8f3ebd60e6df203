"""What the page's readers have yet to be told: numbered messages in one bounded ring.

A reader's queue is the part of the ring behind its place. So a reader that never reads takes no memory, and once the
ring has dropped what it has not read, it gets a snapshot of everything instead. A message about a state (`digest`)
replaces the one before, which is out of date by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KEPT, KEPT_BYTES = 1024, 4 << 20  # Messages in the ring: some minutes of steps and events, and as big as a snapshot
READERS = 32  # At a time: a person has a few pages open, and each may have a snapshot in its socket
OTHERS = 24  # Of these without the token: on loopback all users of a machine may read
STATES = frozenset({"digest"})


class PageMessage(NamedTuple):
    """`data` is one line of JSON."""

    number: int
    event: str
    data: bytes


@dataclass(eq=False, slots=True)
class Reader:
    """`place` is the number of the last message that it was given; None if it needs a snapshot."""

    place: int | None


class PageFeed:
    """`boot` tells the messages of this process from those of one before."""

    def __init__(self, boot: str, *, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        self.boot = boot
        self.newest = 0
        self.readers: set[Reader] = set()
        self._kept, self._kept_bytes = kept, kept_bytes
        self._ring: dict[int, PageMessage] = {}
        self._nbytes = self._lost = 0  # `_lost` is the highest number that some readers may have missed

    def publish(self, event: str, data: bytes) -> None:
        self.newest += 1
        for one in [one for one in self._ring.values() if one.event == event and event in STATES]:
            self._drop(one)
        self._ring[self.newest] = PageMessage(self.newest, event, data)
        self._nbytes += len(data)
        while len(self._ring) > self._kept or self._nbytes > self._kept_bytes:
            oldest = next(iter(self._ring.values()))
            self._lost = oldest.number
            self._drop(oldest)

    def forget(self) -> None:
        """Have everybody get a snapshot, because something was not published."""
        self.newest += 1
        self._ring.clear()
        self._nbytes, self._lost = 0, self.newest

    def join(self, last_id: str, *, is_owner: bool) -> Reader | None:
        """Add a reader that was last told `last_id`, such as "a1b2-17", or nothing. None if there are too many."""
        if len(self.readers) >= (READERS if is_owner else OTHERS):
            return None
        boot, _, digits = last_id.rpartition("-")
        number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else self.newest + 1
        reader = Reader(number if boot == self.boot and number <= self.newest else None)
        self.readers.add(reader)
        return reader

    def take(self, reader: Reader) -> list[PageMessage] | None:
        """Return what the reader has yet to be told, in order. None: give it a snapshot, and set its `place`."""
        if reader.place is None or reader.place < self._lost:
            reader.place = None
            return None
        found = [one for one in self._ring.values() if one.number > reader.place]
        reader.place = self.newest
        return found

    def _drop(self, message: PageMessage) -> None:
        del self._ring[message.number]
        self._nbytes -= len(message.data)
