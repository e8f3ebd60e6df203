"""What the page's readers were told and have yet to be told: numbered messages in one bounded ring.

A reader's queue is the part of the ring behind its place. So a reader that never reads takes no memory, and when the
ring has dropped what it has not read, it gets a snapshot of everything instead. Messages about a state (`digest`) stand
in for the one before, which nobody needs any more.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 1024  # Messages in the ring: steps and events of some minutes, more than a lost connection takes to come back
KEPT_BYTES = 4 << 20  # All of them together: a large snapshot is as big
READERS = 32  # At a time: a person has a few pages open, and each reader may have a snapshot in its socket


@dataclass(frozen=True, slots=True)
class Message:
    """`data` is one line of JSON."""

    number: int
    event: str
    data: bytes


class Reader:
    """One connection. `place` is the number of the last message that it was given; None if it needs a snapshot."""

    def __init__(self, place: int | None) -> None:
        self.place = place


class Feed:
    """`boot` tells the messages of this process from those of one before. `states` are events that replace their
    like."""

    def __init__(
        self,
        boot: str,
        *,
        states: frozenset[str] = frozenset({"digest"}),
        kept: int = KEPT,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.boot = boot
        self.newest = 0
        self.readers: set[Reader] = set()
        self._states = states
        self._kept, self._kept_bytes = kept, kept_bytes
        self._ring: dict[int, Message] = {}
        self._nbytes = 0
        self._latest: dict[str, int] = {}
        # The highest number that was dropped before everybody had read it.
        self._lost = 0

    def publish(self, event: str, data: bytes) -> None:
        self.newest += 1
        if event in self._states:
            self._drop(self._latest.get(event))
            self._latest[event] = self.newest
        self._ring[self.newest] = Message(self.newest, event, data)
        self._nbytes += len(data)
        while self._ring and (len(self._ring) > self._kept or self._nbytes > self._kept_bytes):
            self._lost = next(iter(self._ring))
            self._drop(self._lost)

    def forget(self) -> None:
        """Have everybody get a snapshot, as after something was not published."""
        self.newest += 1
        self._ring.clear()
        self._nbytes, self._lost = 0, self.newest

    def join(self, last_id: str) -> Reader | None:
        """Add a reader that was last told `last_id`, such as "a1b2-17", or nothing. None if there are too many."""
        if len(self.readers) >= READERS:
            return None
        boot, _, number = last_id.rpartition("-")
        is_known = boot == self.boot and number.isascii() and number.isdigit() and len(number) < 16
        reader = Reader(int(number) if is_known and int(number) <= self.newest else None)
        self.readers.add(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        self.readers.discard(reader)

    def take(self, reader: Reader) -> list[Message] | None:
        """Return what the reader has yet to be told. None: it needs a snapshot, of which `given` says the number."""
        if reader.place is None or reader.place < self._lost:
            reader.place = None
            return None
        found = [message for number, message in self._ring.items() if number > reader.place]
        reader.place = self.newest
        return found

    def given(self, reader: Reader, number: int) -> None:
        """The reader was given a snapshot with all that the first `number` messages say."""
        reader.place = number

    def id_of(self, number: int) -> str:
        return f"{self.boot}-{number}"

    def _drop(self, number: int | None) -> None:
        if number is not None and (dropped := self._ring.pop(number, None)) is not None:
            self._nbytes -= len(dropped.data)
