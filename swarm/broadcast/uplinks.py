"""What each node can send: the learner asks it for a little that means nothing, and times what comes.

What a node says of its own uplink costs it nothing, and what others say they got from it is only what a plan asked of
it. A probe shows the line itself, before the first version: TCP's first round trips and the burst that a shaped line
lets through do not count. A node is probed when it joins and once more when it has got over its
start, or has fallen behind under way; the newest rate counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median, median_low

from swarm.types import NodeId

PROBE_BYTES = 1024 * 1024  # 0.3 s of 30 Mbit/s: a volunteer may pay for what is sent
FILLER_BYTES = 4096  # One frame of it, behind whatever else a link has to say
PROBE_S = 4.0  # For so long a node sends of it: what a slow line shows in this time is enough
BURST_BYTES = 64 * 1024  # What a line may let through at once does not count; of little that comes, half
LEAST_S = 1.0  # A shorter part of a probe shows how busy two machines are
SILENT_S = 15.0  # What has not come by then is not waited for
AT_ONCE = 2  # More would share the learner's downlink, and count for less than they are
AGAIN_S = 60.0  # Until a node that has just started, or fell behind, is asked again
MAX_SPREAD = 8.0  # Times the median that a node counts for: it may be fast in a probe alone, and then many wait for it


@dataclass(slots=True)
class _Probe:
    """`came` are moments of arrival and bytes by then."""

    asked_at: float
    came: list[tuple[float, int]] = field(default_factory=list)

    def is_over(self, now: float) -> bool:
        if not self.came or now - self.asked_at > SILENT_S:
            return now - self.asked_at > SILENT_S
        # A busy machine may pause: what it sends after its time counts, if it still comes.
        (first_s, _), (last_s, nbytes) = self.came[0], self.came[-1]
        return nbytes >= PROBE_BYTES or min(now - first_s - PROBE_S, now - last_s - LEAST_S) > 0

    def rate_bytes_per_s(self) -> float:
        """Return the rate after the first burst, or 0 if too little came to tell: the median of the rates between any
        moment and the one half of the way later, for what a busy machine takes up late seems to come at once."""
        nbytes = self.came[-1][1] if self.came else 0
        counted = [one for one in self.came if one[1] >= min(BURST_BYTES, nbytes / 2)]
        if not counted or (counted[-1][0] - counted[0][0] < LEAST_S and nbytes < PROBE_BYTES):
            return 0.0
        pairs = zip(counted, counted[len(counted) // 2 :], strict=False)
        return median((after - before) / max(end_s - start_s, 1e-3) for (start_s, before), (end_s, after) in pairs)


class Uplinks:
    """The uplinks of linked nodes in bytes/s, as probes and plans showed them."""

    def __init__(self) -> None:
        self._rates: dict[NodeId, float] = {}
        self._ask_at: dict[NodeId, float] = {}  # Of all linked nodes; infinity if nothing is left to ask
        self._probes: dict[NodeId, _Probe] = {}
        self._awaited_bytes: dict[NodeId, int] = {}

    def asked_all(self, linked: Iterable[NodeId]) -> bool:
        """Return whether each of these nodes was asked once."""
        return self._ask_at.keys() >= set(linked)

    def due(self, linked: Iterable[NodeId], *, idle: bool, now: float) -> list[NodeId]:
        """Return the nodes to ask now for PROBE_BYTES. Forget those that are no longer linked; end what is over. Only a
        swarm that is `idle`, with no version under way, is asked: what a node sends to others would count against it.
        """
        nodes = dict.fromkeys(linked)
        for gone in [node for node in self._ask_at if node not in nodes]:
            for known in (self._rates, self._ask_at, self._probes, self._awaited_bytes):
                known.pop(gone, None)
        for node in [node for node, probe in self._probes.items() if probe.is_over(now)]:
            rate = self._probes.pop(node).rate_bytes_per_s()
            if rate and node in self._rates:
                self._ask_at[node] = float("inf")
            if rate:
                self._rates[node] = rate
        if not idle:
            self._ask_at.update(dict.fromkeys(self._probes, now))
            self._probes.clear()
            return []
        new = [node for node in nodes if node not in self._ask_at]
        asked = [*new, *(node for node, at in self._ask_at.items() if now >= at)][: AT_ONCE - len(self._probes)]
        for node in asked:
            self._ask_at[node], self._probes[node] = now + AGAIN_S, _Probe(now)
            self._awaited_bytes[node] = self._awaited_bytes.get(node, 0) + PROBE_BYTES
        return asked

    def came(self, node: NodeId, nbytes: int, *, now: float) -> bool:
        """Take what came of a probe. Return False if the node sends more than it was ever asked for."""
        left = self._awaited_bytes[node] = self._awaited_bytes.get(node, 0) - nbytes
        if (probe := self._probes.get(node)) is not None and not probe.is_over(now):
            probe.came.append((now, nbytes + (probe.came[-1][1] if probe.came else 0)))
        return left >= 0

    def lower(self, rates: Mapping[NodeId, float], *, now: float) -> None:
        """Believe that these nodes can send no more than so many bytes/s: they fell behind with what was planned."""
        for node in rates.keys() & self._ask_at.keys():
            self._rates[node], self._ask_at[node] = rates[node], now + AGAIN_S

    def of(self, nodes: Iterable[NodeId]) -> dict[NodeId, float]:
        """Return the uplink of each node in bytes/s, the median where none is known. All are 0 if nobody's is."""
        middle = median_low(self._rates.values()) if self._rates else 0.0
        return {node: min(self._rates.get(node, middle), MAX_SPREAD * middle) for node in nodes}
