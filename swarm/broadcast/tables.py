"""How a chunk table reaches everybody for one copy of the learner's uplink: in parts, each through one relay.

A part cannot be proven by itself; the whole is, by the head. Whoever ends up with another table fetches the right one
from the learner, finds which parts were wrong, and blames who sent them. So a lie costs what a table for everybody
would have cost in the first place. Small tables go to everybody directly.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.broadcast.manifest import Span
from swarm.types import NodeId

LEAST_PART_BYTES = 16 * 1024
MOST_PARTS = 32
"""So that parts never fill the queue of a link."""

DIRECT_BYTES = 64 * 1024
"""Tables that take no more than this for all receivers together are sent directly: a hop would only delay them."""


def parts_of(table_bytes: int) -> list[Span]:
    """The parts of a table, which follow from its size alone."""
    size = max(LEAST_PART_BYTES, -(-table_bytes // MOST_PARTS))
    return [Span(start=at, nbytes=min(size, table_bytes - at)) for at in range(0, table_bytes, size)]


def relays_of(parts: int, uplinks: Mapping[NodeId, float]) -> list[NodeId]:
    """Which relay gets which part, so that all are through soonest. Uplinks in bytes a second; 0 is unknown, and counts
    as the slowest that is known."""
    known = [rate for rate in uplinks.values() if rate > 0]
    least = min(known, default=1.0)
    load = dict.fromkeys(uplinks, 0)
    chosen: list[NodeId] = []
    for _ in range(parts):
        relay = min(load, key=lambda node: (load[node] + 1) / (uplinks[node] or least))
        load[relay] += 1
        chosen.append(relay)
    return chosen


class TableParts:
    """The parts of one table as they come, and who sent them."""

    def __init__(self, table_bytes: int) -> None:
        self.spans = parts_of(table_bytes)
        self._parts: dict[int, bytes] = {}
        self._senders: dict[int, NodeId] = {}

    def put(self, index: int, data: bytes, sender: NodeId) -> bool:
        """Take a part; False for one of another shape. The first that comes counts."""
        if index >= len(self.spans) or len(data) != self.spans[index].nbytes:
            return False
        if index not in self._parts:
            self._parts[index], self._senders[index] = data, sender
        return True

    def whole(self) -> bytes | None:
        """The table, once all parts are there."""
        if len(self._parts) < len(self.spans):
            return None
        return b"".join(self._parts[index] for index in range(len(self.spans)))

    def liars(self, table: bytes) -> list[NodeId]:
        """Who sent parts that are not those of the right `table`."""
        wrong = [i for i, data in self._parts.items() if data != _cut(table, self.spans[i])]
        return [self._senders[index] for index in wrong]


def _cut(data: bytes, span: Span) -> bytes:
    return data[span.start : span.start + span.nbytes]
