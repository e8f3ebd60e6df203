"""What each node can send: the learner asks it once for a little that means nothing, and times what comes.

What a node says of its own uplink costs it nothing, and what others say they got from it is only what a plan asked of
it. A probe shows the line itself, before the first version, within a few percent: TCP's first round trips and the burst
that a shaped line lets through are over in the half that counts. A node that joins is probed at once, since it feeds
nobody yet. One whose uplink turned out smaller under way is asked again much later, while nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from swarm.types import NodeId

PROBE_BYTES = 1024 * 1024  # 0.3 s of 30 Mbit/s, and once: a volunteer may pay for what is sent
FILLER_BYTES = 4096  # One frame of it, behind whatever else a link has to say
PROBE_S = 3.0  # What a slow line shows in this time is enough
SILENT_S = 15.0  # A node that sent nothing of it by then is not waited for
AT_ONCE = 2  # More would share the learner's downlink, and count for less than they are
AGAIN_S = 600.0  # Until a node that turned out slower is asked once more
MAX_SPREAD = 8.0  # Times the median that a node counts for: it may be fast in a probe alone, and then many wait for it


@dataclass(slots=True)
class _Probe:
    """`came` are moments of arrival and bytes by then."""

    asked_at: float
    came: list[tuple[float, int]] = field(default_factory=list)

    def is_over(self, now: float) -> bool:
        if not self.came:
            return now - self.asked_at > SILENT_S
        return self.came[-1][1] >= PROBE_BYTES or now - self.came[0][0] > PROBE_S

    def rate_bytes_per_s(self) -> float:
        """Return the rate of the later half of the time, 0 if too little came to tell."""
        if len(self.came) < 3:
            return 0.0
        (first_s, _), (last_s, nbytes) = self.came[0], self.came[-1]
        middle_s, before = next(one for one in reversed(self.came[:-1]) if one[0] <= (first_s + last_s) / 2)
        return (nbytes - before) / max(last_s - middle_s, 1e-3)


class Uplinks:
    """The uplinks of linked nodes in bytes/s, as probes and plans showed them."""

    def __init__(self) -> None:
        self._rates: dict[NodeId, float] = {}
        self._asked_at: dict[NodeId, float] = {}
        self._due_bytes: dict[NodeId, int] = {}
        self._lowered: set[NodeId] = set()
        self._probes: dict[NodeId, _Probe] = {}

    def due(self, linked: Iterable[NodeId], *, idle: bool, now: float) -> list[NodeId]:
        """Return the nodes to ask now for PROBE_BYTES. Forget those that are no longer linked; end what is over.
        `idle` says that no version is under way."""
        nodes = dict.fromkeys(linked)
        for gone in [node for node in self._asked_at if node not in nodes]:
            self._forget(gone)
        for node in [node for node, probe in self._probes.items() if probe.is_over(now)]:
            if rate := self._probes.pop(node).rate_bytes_per_s():
                self._rates[node] = rate
                self._lowered.discard(node)
        new = [node for node in nodes if node not in self._asked_at]
        again = [node for node in sorted(self._lowered - self._probes.keys()) if now - self._asked_at[node] > AGAIN_S]
        asked = [*new, *(again if idle else [])][: AT_ONCE - len(self._probes)]
        for node in asked:
            self._asked_at[node], self._probes[node] = now, _Probe(now)
            self._due_bytes[node] = self._due_bytes.get(node, 0) + PROBE_BYTES
        return asked

    def came(self, node: NodeId, nbytes: int, *, now: float) -> bool:
        """Take what came of a probe. Return False if the node sends more than it was ever asked for."""
        left = self._due_bytes[node] = self._due_bytes.get(node, 0) - nbytes
        if (probe := self._probes.get(node)) is not None and not probe.is_over(now):
            probe.came.append((now, nbytes + (probe.came[-1][1] if probe.came else 0)))
        return left >= 0

    def lower(self, rates: Mapping[NodeId, float]) -> None:
        """Believe that these nodes can send no more than so many bytes/s: they fell behind with what was planned."""
        for node, rate in rates.items():
            if node in self._asked_at:
                self._rates[node] = rate
                self._lowered.add(node)

    def of(self, nodes: Iterable[NodeId]) -> dict[NodeId, float]:
        """Return the uplink of each node in bytes/s, the median where none is known. All are 0 if nobody's is."""
        middle = median_low(self._rates.values()) if self._rates else 0.0
        return {node: min(self._rates.get(node, middle), MAX_SPREAD * middle) for node in nodes}

    def _forget(self, node: NodeId) -> None:
        for known in (self._rates, self._asked_at, self._due_bytes, self._probes):
            known.pop(node, None)
        self._lowered.discard(node)
