"""What one node in trees misses: which chunks are overdue, lost or late, and which parents fall behind.

Chunks of a stripe come from its parent in index order, or nearly, so that its lowest missing chunk against the median
stripe says how far it lags. Overdue is what the trees lost: it is asked of anybody. Late is what a slow parent still
has to send: it is asked of those who offer help.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from swarm.broadcast.notes import MAX_INDICES, has_bit
from swarm.types import NodeId

TICK_S = 0.5  # How often the node looks for overdue chunks, and offers help

ORPHAN_S = 1.0  # A stripe whose parent left is pulled after this time; a new plan mostly comes sooner

SILENT_S = 8.0
"""A silent stripe is pulled after this time: an orphaned parent has recovered by then, and a parent that was not linked
yet is."""

SILENT_INTERVALS = 8  # On top of SILENT_S, in planned intervals between chunks, because a slow swarm needs longer

LAG_ROUNDS = 4  # A stripe this many chunks behind the median stripe lags; what is left at the end is late at once
KEEP_ROUNDS = 2  # So many chunks of a stripe that lags are left to its parent, which has mostly begun to send them

BEHIND_S = 8.0
"""The lowest missing chunk of a stripe is this far behind the median stripe if its parent cannot keep up."""

BEHIND_SHARE = 0.8
"""The parent must also send at under a fifth of the median stripe's pace. Where all uplinks are full, stripes that
started late catch up at the others' cost, which is nobody's fault: at half of the pace, moves made a transfer of 64
peers take 1.5 times as long."""

BEHIND_TICKS = 10  # Ticks over which falling behind is measured; a new parent gets as many to catch up
ASK_S = 4.0  # An unanswered ask goes to another peer after this time
TRIES = 2  # Peers asked in vain before the learner is asked


@dataclass(frozen=True, slots=True)
class Ask:
    """A chunk that `peer` was asked for."""

    peer: NodeId
    until: float


class Pulls:
    """Progress by stripe, and at most MAX_INDICES open asks. `held` is the owner's bitmap; this class only reads it.
    `chunks_per_s` is the pace planned for everybody, 0 if unknown."""

    def __init__(self, *, count: int, stripes: int, held: bytearray) -> None:
        self._count = count
        self._stripes = stripes
        self._held = held
        self._low = list(range(stripes))
        self._reach = -1
        self._moved_at: list[float | None] = [None] * stripes
        self._orphaned = [False] * stripes
        self._seen = [-1 if stripe < count else count - 1 for stripe in range(stripes)]
        self._came = [0] * stripes
        self._sent: deque[tuple[int, list[int]]] = deque(maxlen=BEHIND_TICKS)
        self._changed = [0] * stripes
        self._tries: dict[int, int] = {}
        self.asks: dict[int, Ask] = {}
        self.chunks_per_s = 0.0

    def begin(self, *, now: float) -> None:
        """Start the patience of every stripe when the first link is up. Later calls change nothing."""
        self._moved_at = [now if at is None else at for at in self._moved_at]

    def restart(self, stripe: int, *, orphaned: bool = False, now: float) -> None:
        """Start a stripe's patience again, because its parent came, changed or left."""
        self._moved_at[stripe] = now
        self._orphaned[stripe] = orphaned
        self._changed[stripe] = BEHIND_TICKS

    def arrived(self, index: int, *, from_parent: bool, now: float) -> None:
        stripe = index % self._stripes
        self._seen[stripe] = max(self._seen[stripe], index if index + self._stripes < self._count else self._count - 1)
        if index > self._reach:
            self._reach = index
        if from_parent:
            # What is pulled does not count: each chunk of a parent that never links would be waited for anew.
            self._moved_at[stripe] = now
            self._came[stripe] += 1

    def ask(self, index: int, peer: NodeId, *, now: float) -> None:
        assert len(self.asks) < MAX_INDICES
        self.asks[index] = Ask(peer, now + ASK_S)

    def expire(self, *, now: float) -> None:
        """Give up asks that were not answered in time."""
        for index in [index for index, ask in self.asks.items() if ask.until <= now]:
            del self.asks[index]
            self._tries[index] = self._tries.get(index, 0) + 1

    def exhausted(self, index: int) -> bool:
        """Return True if enough peers were asked in vain, so that the learner is next."""
        return self._tries.get(index, 0) >= TRIES

    def forget(self) -> None:
        self.asks.clear()
        self._tries.clear()

    def overdue(self, *, now: float) -> list[int]:
        """Return at most MAX_INDICES chunks of silent stripes that are missing and not asked for, in index order."""
        lost = [stripe for stripe in range(self._stripes) if self._is_lost(stripe, now)]
        end = self._count if len(lost) == self._stripes else self._reach + 1
        found: list[int] = []
        for stripe in lost:
            found += self._missing(range(self._lowest(stripe), end, self._stripes))
        return sorted(found)[:MAX_INDICES]

    def behind(self) -> list[int]:
        """Return the stripes whose parents cannot keep up. Call it once a tick."""
        middle = self._middle_round()
        before = self._sent[0] if len(self._sent) == BEHIND_TICKS else None
        self._sent.append((middle, list(self._came)))
        self._changed = [max(0, ticks - 1) for ticks in self._changed]
        if before is None:
            return []
        least = (1 - BEHIND_SHARE) * (middle - before[0])
        return [
            stripe
            for stripe, (came, came_before) in enumerate(zip(self._came, before[1], strict=True))
            if came - came_before < least
            and (middle - self._lowest(stripe) // self._stripes) * self._interval_s() > BEHIND_S
            and not self._changed[stripe]
        ]

    def late(self) -> list[int]:
        """Return at most MAX_INDICES chunks of stripes that lag, which are missing and not asked for."""
        middle = self._middle_round()
        lag, keep = (0, 0) if self.ending else (LAG_ROUNDS, KEEP_ROUNDS)
        found: list[int] = []
        for stripe in range(self._stripes):
            low = self._lowest(stripe)
            if middle - low // self._stripes >= lag:
                end = min(self._count, (middle + 1) * self._stripes)
                found += self._missing(range(low + keep * self._stripes, end, self._stripes))
        return found[:MAX_INDICES]

    @property
    def ending(self) -> bool:
        """Whether the median stripe has ended."""
        return self._middle_round() == (self._count - 1) // self._stripes

    def _middle_round(self) -> int:
        """Return how many chunks the median stripe is from its first."""
        return sorted(self._seen)[self._stripes // 2] // self._stripes

    def _is_lost(self, stripe: int, now: float) -> bool:
        moved_at = self._moved_at[stripe]
        if moved_at is None:
            return False
        silent_s = SILENT_S + SILENT_INTERVALS * self._interval_s()
        return now - moved_at >= (ORPHAN_S if self._orphaned[stripe] else silent_s)

    def _interval_s(self) -> float:
        """Return the planned time between two chunks of a stripe. What a starved node got would make it wait for ever
        longer."""
        return self._stripes / self.chunks_per_s if self.chunks_per_s else 0.0

    def _lowest(self, stripe: int) -> int:
        """Return the first chunk of a stripe that is missing, or one past its end."""
        low = self._low[stripe]
        while low < self._count and has_bit(self._held, low):
            low += self._stripes
        self._low[stripe] = low
        return low

    def _missing(self, indices: Iterable[int]) -> list[int]:
        """Return the first MAX_INDICES of these chunks that are missing and not asked for."""
        missing = (index for index in indices if not has_bit(self._held, index) and index not in self.asks)
        return list(islice(missing, MAX_INDICES))
