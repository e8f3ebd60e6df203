"""How a version's head and its chunk table get from the learner to every receiver.

Tables. A large chunk table reaches everybody for one copy of the learner's uplink: in parts, each through one
forwarder. A part cannot be proven by itself; the head proves the whole. A receiver that ends up with a wrong table
fetches the right one from a public that has it, or from the learner. Then it finds which parts were wrong and blames
their senders. So a lie costs the learner at most what sending the table to everybody would have cost. Small tables go
to everybody directly. In trees, where a forwarder has links to few nodes, part i goes down the tree of stripe i; the
sender of a wrong one may have got it so there, and is not blamed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from swarm.broadcast.version.manifest import TABLE_BYTES, ByteSpan, Head
from swarm.types import NodeId, VersionId

MIN_PART_BYTES = 16 * 1024
MAX_PARTS = 32  # The parts of a table never fill a link's queue
PART_BYTES = TABLE_BYTES // MAX_PARTS  # Largest part of the largest table

EARLY_BYTES = 8 * 1024 * 1024
"""Room for parts that arrive before their heads: two usual tables, or one of the largest."""

ENTRY_BYTES = 1024  # A part counts this much on top of its bytes, so that there are at most 8,192 parts

DIRECT_BYTES = 64 * 1024
"""If a table takes no more than this for all receivers together, it is sent directly: a hop would only delay it."""


def parts_of(table_bytes: int) -> list[ByteSpan]:
    """Cut a table into parts. They follow from its size alone."""
    size = max(MIN_PART_BYTES, -(-table_bytes // MAX_PARTS))
    return [ByteSpan(start=at, nbytes=min(size, table_bytes - at)) for at in range(0, table_bytes, size)]


def forwarders_of(parts: int, uplinks: Mapping[NodeId, float]) -> list[NodeId]:
    """Choose the forwarder of each part so that all are done soonest. Uplinks are in bytes/s; 0 if none is known."""
    load = dict.fromkeys(uplinks, 0)
    chosen: list[NodeId] = []
    for _ in range(parts):
        forwarder = min(load, key=lambda node: (load[node] + 1) / (uplinks[node] or 1.0))
        load[forwarder] += 1
        chosen.append(forwarder)
    return chosen


class EarlyParts:
    """Parts that arrived before their heads and that nothing can prove yet: at most EARLY_BYTES. Beyond that the node
    that sent most loses its oldest part, so that a flood only drives out itself."""

    def __init__(self) -> None:
        self._sent: dict[NodeId, deque[tuple[VersionId, int, bytes]]] = {}
        self._nbytes: dict[NodeId, int] = {}

    def put(self, version: VersionId, index: int, data: bytes, sender: NodeId) -> None:
        """Keep a part of the version that `sender` names."""
        self._sent.setdefault(sender, deque()).append((version, index, data))
        self._nbytes[sender] = self._nbytes.get(sender, 0) + len(data) + ENTRY_BYTES
        while sum(self._nbytes.values()) > EARLY_BYTES:
            most = max(self._nbytes, key=lambda node: self._nbytes[node])
            self._nbytes[most] -= len(self._sent[most].popleft()[2]) + ENTRY_BYTES
            if not self._sent[most]:
                del self._sent[most], self._nbytes[most]

    def take(self, version: VersionId) -> list[tuple[int, bytes, NodeId]]:
        """Return the parts of a version. Forget them and those of older versions."""
        found: list[tuple[int, bytes, NodeId]] = []
        before, self._sent, self._nbytes = self._sent, {}, {}
        for sender, parts in before.items():
            for of, index, data in parts:
                if of == version:
                    found.append((index, data, sender))
                elif of > version:
                    self.put(of, index, data, sender)
        return found


MAX_ANNOUNCED = 4
"""Newest heads that may wait for their tables. A node that is further behind catches up (receiver/catchup.py)."""

TABLE_S = 2.0
"""How long after its head an incomplete table is asked for: a forwarder may have died with a part of it."""


class Announced:
    """A head, and the parts of its table that came, with who sent them. `timer` ends the wait for the others."""

    def __init__(self, sealed: bytes, head: Head, timer: asyncio.TimerHandle) -> None:
        self.sealed = sealed
        self.head = head
        self.version = head.version
        self.timer = timer
        self._spans = parts_of(head.table_bytes)
        self._parts: dict[int, tuple[bytes, NodeId]] = {}

    def put(self, index: int, data: bytes, sender: NodeId) -> bool:
        """Take a part. Return False if it has the wrong shape or is here already: the first to come counts."""
        if index in self._parts or index >= len(self._spans) or len(data) != self._spans[index].nbytes:
            return False
        self._parts[index] = data, sender
        return True

    def table(self) -> bytes | None:
        """Return the table, or None while parts are missing."""
        if len(self._parts) < len(self._spans):
            return None
        return b"".join(self._parts[index][0] for index in range(len(self._spans)))

    def liars(self, table: bytes) -> list[NodeId]:
        """Return the senders of parts that differ from the right `table`."""
        spans = self._spans
        return [sender for i, (data, sender) in self._parts.items() if data != table[spans[i].at]]


class Announcements:
    """Heads that wait for their tables. `on_ready` gets each once: when its table is here, or after TABLE_S."""

    def __init__(self, on_ready: Callable[[Announced], None]) -> None:
        self._on_ready = on_ready
        self._waiting: dict[VersionId, Announced] = {}
        self._early = EarlyParts()

    def take_head(self, sealed: bytes, head: Head) -> None:
        """Take a head that the learner signed, with the parts of its table that came before it."""
        version = head.version
        if version in self._waiting:
            return  # It came again over a new link.
        timer = asyncio.get_running_loop().call_later(TABLE_S, self._finish, version)
        self._waiting[version] = Announced(sealed, head, timer)
        while len(self._waiting) > MAX_ANNOUNCED:
            self._waiting.pop(min(self._waiting)).timer.cancel()
        for index, data, sender in self._early.take(version):
            self.take_part(version, index, data, sender)

    def take_part(self, version: VersionId, index: int, data: bytes, sender: NodeId) -> bool:
        """Take a part of a table from any linked node. It may come before the head. Return True if the head is here
        and the part was missing."""
        announced = self._waiting.get(version)
        if announced is None:
            self._early.put(version, index, data, sender)
            return False
        is_new = announced.put(index, data, sender)
        if is_new and announced.table() is not None:
            self._finish(version)
        return is_new

    def close(self) -> None:
        for announced in self._waiting.values():
            announced.timer.cancel()
        self._waiting.clear()

    def _finish(self, version: VersionId) -> None:
        if (announced := self._waiting.pop(version, None)) is not None:
            announced.timer.cancel()
            self._on_ready(announced)
