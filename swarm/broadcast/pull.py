"""What a node of a static tree misses, and what it has asked for: the books of its pulls.

A chunk is overdue if its stripe is lost (nothing comes, and nothing is to be expected) and others went on past it, or
if its parent has long sent a later one: it was lost on the way or refused as wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.broadcast.notes import MAX_INDICES, has_bit
from swarm.types import NodeId

TICK_S = 1.0
"""How often what is overdue is looked for."""

PATIENCE_TICKS = 3
"""A chunk is missed when its parent sent a later one 3 s ago: the order is by index, and retransmission takes less."""

ORPHAN_S = 1.0
"""Without a linked parent a stripe is pulled after that time; a new plan mostly comes sooner."""

SILENT_S = 8.0
"""A stripe whose parent is linked is pulled after that time: the parent, an orphan itself, has repaired by then."""

SILENT_INTERVALS = 8
"""And after that many times its mean interval between chunks, which is what a slow swarm needs."""

END_SHARE = 0.03
"""Others being whole for so much of the time that the transfer took is no accident of the last chunks: the parent of
what is still missing is too slow."""

BEHIND_S = 4.0
"""A stripe that is so far behind the median stripe, and falls further behind, has a parent that cannot keep up."""

BEHIND_SHARE = 0.5
"""And comes at under half of the pace of the others. Where all uplinks are full a few percent are nobody's fault, and
moving children about for that would cost more than it gains."""

BEHIND_TICKS = 3
"""Falling behind is measured over so many ticks; a new parent is given as many to show what it can."""

ASK_S = 4.0
"""An answer that has not come by then is asked for elsewhere."""

TRIES = 2
"""After so many peers in vain it is the learner that is asked."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A chunk that `peer` was asked for."""

    peer: NodeId
    until: float


class Pulls:
    """Progress by stripe, and asks under way: at most MAX_INDICES. `held` is the owner's bitmap, read only."""

    def __init__(self, *, count: int, stripes: int, held: bytearray) -> None:
        self._count = count
        self._stripes = stripes
        self._held = held
        self._low = list(range(stripes))
        self._reach = -1
        self._front = [-1] * stripes
        self._fronts: deque[list[int]] = deque(maxlen=PATIENCE_TICKS)
        self._moved_at: list[float | None] = [None] * stripes
        self._began_at: float | None = None
        self._arrived_at = 0.0
        self._arrivals = 0
        self._seen = [-1] * stripes
        self._lags: deque[list[float]] = deque(maxlen=BEHIND_TICKS)
        self._changed = [0] * stripes
        self._tries: dict[int, int] = {}
        self.asks: dict[int, Ask] = {}

    def begin(self, *, now: float) -> None:
        """The first link is up: from now on silence means something."""
        self._moved_at = [now if at is None else at for at in self._moved_at]

    def restart(self, stripe: int, *, now: float) -> None:
        """The stripe's parent came, went or changed: its patience begins again."""
        self._moved_at[stripe] = now
        self._changed[stripe] = BEHIND_TICKS

    def arrived(self, index: int, *, from_parent: bool, now: float) -> None:
        stripe = index % self._stripes
        self._moved_at[stripe] = now
        self._arrivals += 1
        self._arrived_at = now
        if self._began_at is None:
            self._began_at = now
        if index > self._seen[stripe]:
            self._seen[stripe] = index
        if index > self._reach:
            self._reach = index
        if from_parent and index > self._front[stripe]:
            self._front[stripe] = index

    def ask(self, index: int, peer: NodeId, *, now: float) -> None:
        assert len(self.asks) < MAX_INDICES
        self.asks[index] = Ask(peer, now + ASK_S)

    def expired(self, *, now: float) -> list[int]:
        """Asks that were in vain."""
        late = [index for index, ask in self.asks.items() if ask.until <= now]
        for index in late:
            self._tries[index] = self._tries.get(index, 0) + 1
        return late

    def exhausted(self, index: int) -> bool:
        """Whether enough peers were asked in vain for the learner to be asked."""
        return self._tries.get(index, 0) >= TRIES

    def forget(self) -> None:
        """All is held."""
        self.asks.clear()
        self._tries.clear()

    def overdue(self, linked: Sequence[bool], *, now: float) -> list[int]:
        """Missing, not asked for and late, in index order, at most MAX_INDICES. `linked`: which stripes' parents are.

        To be called once a tick: it remembers how far each stripe was PATIENCE_TICKS ago.
        """
        lost = [self._is_lost(stripe, linked[stripe], now) for stripe in range(self._stripes)]
        end = self._count if all(lost) else self._reach + 1
        fronts = self._fronts[0] if len(self._fronts) == PATIENCE_TICKS else [-1] * self._stripes
        found: list[int] = []
        for stripe in range(self._stripes):
            found += self._missing(stripe, end if lost[stripe] else fronts[stripe])
        self._fronts.append(list(self._front))
        return sorted(found)[:MAX_INDICES]

    def behind(self) -> list[int]:
        """Stripes whose parents cannot keep up. To be called once a tick."""
        middle = sorted(self._seen)[self._stripes // 2]
        lags = [(middle - seen) / self._stripes * self._interval_s() for seen in self._seen]
        before = self._lags[0] if len(self._lags) == BEHIND_TICKS else None
        self._lags.append(lags)
        self._changed = [max(0, ticks - 1) for ticks in self._changed]
        if before is None:
            return []
        growth_s = BEHIND_SHARE * BEHIND_TICKS * TICK_S
        return [
            stripe
            for stripe, (lag, old) in enumerate(zip(lags, before, strict=True))
            if lag > BEHIND_S and lag - old > growth_s and not self._changed[stripe]
        ]

    def last_missing(self, *, whole_at: float | None, now: float) -> list[int]:
        """Missing and not asked for, the last first, since somebody else is whole for long. The parents send the first
        of them meanwhile."""
        if whole_at is None or not self._is_ending(whole_at, now):
            return []
        found: list[int] = []
        for index in range(self._count - 1, -1, -1):
            if not has_bit(self._held, index) and index not in self.asks:
                found.append(index)
                if len(found) == MAX_INDICES:
                    break
        return found

    def _is_ending(self, whole_at: float, now: float) -> bool:
        return self._began_at is not None and now - whole_at >= max(TICK_S, END_SHARE * (now - self._began_at))

    def _is_lost(self, stripe: int, linked: bool, now: float) -> bool:
        moved_at = self._moved_at[stripe]
        if moved_at is None:
            return False
        return now - moved_at >= (SILENT_S + SILENT_INTERVALS * self._interval_s() if linked else ORPHAN_S)

    def _interval_s(self) -> float:
        """Mean time between two chunks of a stripe, while chunks came."""
        if self._began_at is None:
            return 0.0
        return (self._arrived_at - self._began_at) * self._stripes / self._arrivals

    def _missing(self, stripe: int, end: int) -> list[int]:
        low = self._low[stripe]
        while low < self._count and has_bit(self._held, low):
            low += self._stripes
        self._low[stripe] = low
        found: list[int] = []
        for index in range(low, end, self._stripes):
            if not has_bit(self._held, index) and index not in self.asks:
                found.append(index)
                if len(found) == MAX_INDICES:
                    break
        return found
