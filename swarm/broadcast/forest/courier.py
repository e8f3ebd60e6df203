"""One node's part in the trees of a star or a forest.

Theory of operation. Chunk i belongs to stripe i mod K. The node queues a new chunk for the children of its stripe, one
queue for each link, in index order. A link is asked for its next frame only when it can take one, so a slow child
delays only its own subtree. A child that joins, comes back, or gets this node as its parent in a new plan says what it
holds (Have) and is sent the rest.

A node pulls what the trees lost and, at the end, what a slow parent still has. A chunk is overdue if its stripe has
been silent for too long (sooner if its parent is not linked), or if its parent sent a later chunk some time ago, so
that this one was lost, or refused as wrong. The node asks (Want) a peer known to hold the chunk, else a parent in
another stripe, else the learner, and passes the chunk on to its children like any other. A peer sends what it is asked
for as soon as it holds it, and says what it holds. Pulls end by themselves when new routes come.

Bounds: an index is in a link's queue once. For each peer at most MAX_INDICES requests wait for a chunk, and as many
wait for the link. This node has at most MAX_INDICES open asks in all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from random import Random

from swarm.broadcast.notes import (
    MAX_INDICES,
    Behind,
    Complete,
    Have,
    Note,
    NoteKind,
    Routing,
    Send,
    Want,
    has_bit,
    set_bit,
)
from swarm.types import NodeId

TICK_S = 1.0  # How often the node looks for overdue chunks

PATIENCE_TICKS = 3
"""A chunk is missed once its parent sent a later one 3 s ago. Chunks go by index, and a retransmission takes less."""

ORPHAN_S = 1.0  # A stripe whose parent left is pulled after this time; a new plan mostly comes sooner

SILENT_S = 8.0
"""A silent stripe is pulled after this time: an orphaned parent has recovered by then, and a parent that was not linked
yet is."""

SILENT_INTERVALS = 8  # On top of SILENT_S, in mean intervals between chunks, because a slow swarm needs longer

END_SHARE = 0.03
"""If another peer has been complete for this share of the transfer's time, the parents of the chunks still missing are
too slow. A shorter delay is normal for the last chunks."""

BEHIND_S = 8.0
"""A stripe this far behind the median stripe, and still losing ground, has a parent that cannot keep up."""

BEHIND_SHARE = 0.8
"""The stripe must also run at under a fifth of the others' pace. Where all uplinks are full, stripes that started late
catch up at the others' cost, which is nobody's fault: at half of the pace, moves made a transfer of 64 peers take 1.5
times as long."""

BEHIND_TICKS = 5  # Ticks over which falling behind is measured; a new parent gets as many to catch up
ASK_S = 4.0  # An unanswered ask goes to another peer after this time
TRIES = 2  # Peers asked in vain before the learner is asked


@dataclass(frozen=True, slots=True)
class Ask:
    """A chunk that `peer` was asked for."""

    peer: NodeId
    until: float


class Pulls:
    """Progress by stripe, and at most MAX_INDICES open asks. `held` is the owner's bitmap; this class only reads it."""

    def __init__(self, *, count: int, stripes: int, held: bytearray) -> None:
        self._count = count
        self._stripes = stripes
        self._held = held
        self._low = list(range(stripes))
        self._reach = -1
        self._front = [-1] * stripes
        self._fronts: deque[list[int]] = deque(maxlen=PATIENCE_TICKS)
        self._moved_at: list[float | None] = [None] * stripes
        self._orphaned = [False] * stripes
        self._began_at: float | None = None
        self._arrived_at = 0.0
        self._arrivals = 0
        self._seen = [-1] * stripes
        self._lags: deque[list[float]] = deque(maxlen=BEHIND_TICKS)
        self._changed = [0] * stripes
        self._tries: dict[int, int] = {}
        self.asks: dict[int, Ask] = {}

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
        self._arrivals += 1
        self._arrived_at = now
        if self._began_at is None:
            self._began_at = now
        if index > self._seen[stripe]:
            self._seen[stripe] = index
        if index > self._reach:
            self._reach = index
        if from_parent:
            # What is pulled does not count: each chunk of a parent that never links would be waited for anew.
            self._moved_at[stripe] = now
            self._front[stripe] = max(self._front[stripe], index)

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
        """Return at most MAX_INDICES chunks that are missing, late and not asked for, in index order.

        Call it once a tick: it remembers how far each stripe was PATIENCE_TICKS ago.
        """
        lost = [self._is_lost(stripe, now) for stripe in range(self._stripes)]
        end = self._count if all(lost) else self._reach + 1
        fronts = self._fronts[0] if len(self._fronts) == PATIENCE_TICKS else [-1] * self._stripes
        found: list[int] = []
        for stripe in range(self._stripes):
            found += self._missing(range(self._lowest(stripe), end if lost[stripe] else fronts[stripe], self._stripes))
        self._fronts.append(list(self._front))
        return sorted(found)[:MAX_INDICES]

    def behind(self) -> list[int]:
        """Return the stripes whose parents cannot keep up. Call it once a tick."""
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
        """Return chunks that are missing and not asked for, if another peer has been complete for long enough. The
        highest come first, because the parents go on sending the lowest."""
        if whole_at is None or not self._is_ending(whole_at, now):
            return []
        return self._missing(range(self._count - 1, -1, -1))

    def _is_ending(self, whole_at: float, now: float) -> bool:
        return self._began_at is not None and now - whole_at >= max(TICK_S, END_SHARE * (now - self._began_at))

    def _is_lost(self, stripe: int, now: float) -> bool:
        moved_at = self._moved_at[stripe]
        if moved_at is None:
            return False
        silent_s = SILENT_S + SILENT_INTERVALS * self._interval_s()
        return now - moved_at >= (ORPHAN_S if self._orphaned[stripe] else silent_s)

    def _interval_s(self) -> float:
        """Return the mean time between two chunks of a stripe, from the first arrival to the last."""
        if self._began_at is None:
            return 0.0
        return (self._arrived_at - self._began_at) * self._stripes / self._arrivals

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


ASKED_OF_ONE = 16  # Chunks asked of one peer at a time: 1 MiB of 64 KiB chunks

MAX_NOTES = 2
"""A peer with this many notes waiting is sent no more requests or complaints. The newest Have may come on top."""

HAVE_EVERY_S = 1.0  # Shortest interval between bitmaps for a peer that asks for chunks this node lacks

LEAD_ROUNDS = 4
"""Chunks of each stripe by which a link may be ahead of the others. Sockets share an uplink evenly, but a child in two
stripes needs twice as much: without this limit some stripes ran at 60 % of others, and all took 1.27 times as long."""

WALK = 1.4
"""Multiple of the planned pace at which links go on while another holds them up. With 100 peers the transfer then takes
1.13 times the bound; waiting for half of the links took 1.26, for all 1.98. Below the planned pace a stalled child
would hold up everybody."""


@dataclass(slots=True)
class _Link:
    """The state of one link. Bit i of `theirs` is set if the peer says it has chunk i, sent it or was sent it."""

    theirs: bytearray
    told_at: float | None = None
    notes: deque[Note] = field(default_factory=deque)
    queue: list[int] = field(default_factory=list)
    asked: deque[int] = field(default_factory=deque)
    wishes: set[int] = field(default_factory=set)


class TreeCourier:
    """A Courier for routes that the learner plans. `held` is a bitmap as in Have; the learner holds everything."""

    def __init__(self, *, count: int, learner: NodeId, routes: Routing, held: bytes = b"", random: Random) -> None:
        assert count >= 1
        self._count = count
        self._learner = learner
        self._random = random
        self._routes = routes
        self._links: dict[NodeId, _Link] = {}
        self._ready: dict[NodeId, None] = {}
        self._held = bytearray(held.ljust((count + 7) // 8, b"\0"))
        self._missing = count - int.from_bytes(held).bit_count()
        self.complete = self._missing == 0
        self.pulled = 0
        self.stripes = len(routes.parents)
        self._pulls = Pulls(count=count, stripes=self.stripes, held=self._held)
        self._wishers: dict[int, dict[NodeId, None]] = {}
        self._limit = LEAD_ROUNDS * self.stripes
        self._until_paced = 0
        self._ahead: dict[NodeId, None] = {}
        self._tick_at: float | None = None
        self._whole_at: float | None = None
        self._complaints: dict[tuple[NodeId, int], None] = {}

    def held_by(self, peer: NodeId) -> int:
        """Return how many chunks a peer is known to hold; 0 for most whose parent is another node."""
        link = self._links.get(peer)
        return min(self._count, int.from_bytes(link.theirs).bit_count()) if link is not None else 0

    # -- routes and links ------------------------------------------------------------------------------------

    def set_routes(self, routes: Routing, *, now: float) -> None:
        """Take a plan with as many stripes. Tell new parents what is held, and queue what new children lack."""
        assert len(routes.parents) == self.stripes
        old, self._routes = self._routes, routes
        for stripe in range(self.stripes):
            if routes.parents[stripe] != old.parents[stripe]:
                self._pulls.restart(stripe, now=now)
                if (link := self._links.get(parent := routes.parents[stripe])) is not None:
                    self._tell(parent, link, now)
            for child in old.children[stripe]:
                if child not in routes.children[stripe]:
                    self._release(child, stripe)
            for child in routes.children[stripe]:
                if child not in old.children[stripe] and (link := self._links.get(child)) is not None:
                    self._enqueue_stripe(child, link, stripe)

    def _release(self, child: NodeId, stripe: int) -> None:
        link = self._links.get(child)
        if link is not None:
            link.queue = [index for index in link.queue if index % self.stripes != stripe]
            heapify(link.queue)

    def _enqueue_stripe(self, child: NodeId, link: _Link, stripe: int) -> None:
        queued = set(link.queue)
        for index in range(stripe, self._count, self.stripes):
            if has_bit(self._held, index) and not has_bit(link.theirs, index) and index not in queued:
                link.queue.append(index)
        heapify(link.queue)
        self._ready[child] = None

    def join(self, peer: NodeId, *, leaf: bool, now: float) -> None:
        assert peer not in self._links
        link = self._links[peer] = _Link(bytearray((self._count + 7) // 8))
        self._pulls.begin(now=now)
        if self._missing < self._count:
            self._tell(peer, link, now)
        for stripe in range(self.stripes):
            if peer in self._routes.children[stripe]:
                self._enqueue_stripe(peer, link, stripe)
            if self._routes.parents[stripe] == peer:
                self._pulls.restart(stripe, now=now)
        self._arm(now)

    def leave(self, peer: NodeId, *, now: float) -> None:
        link = self._links.pop(peer, None)
        self._ready.pop(peer, None)
        for index in link.wishes if link is not None else ():
            del self._wishers[index][peer]
        for index in [index for index, ask in self._pulls.asks.items() if ask.peer == peer]:
            del self._pulls.asks[index]
        for stripe, parent in enumerate(self._routes.parents):
            if parent == peer:
                self._pulls.restart(stripe, orphaned=True, now=now)
        self._arm(now)

    # -- what comes in ---------------------------------------------------------------------------------------

    def arrived(self, peer: NodeId, index: int, kind: NoteKind, via: NodeId | None, *, now: float) -> None:
        if not 0 <= index < self._count:
            return
        link = self._links.get(peer)
        if link is not None:
            set_bit(link.theirs, index)
        from_parent = kind is NoteKind.FRESH and self._routes.parents[index % self.stripes] == peer
        self._pulls.arrived(index, from_parent=from_parent, now=now)
        self._pulls.asks.pop(index, None)
        if has_bit(self._held, index):
            return
        set_bit(self._held, index)
        self._missing -= 1
        for child in self._routes.children[index % self.stripes]:
            link = self._links.get(child)
            if link is not None and not has_bit(link.theirs, index):
                heappush(link.queue, index)
                self._ready[child] = None
        for wisher in self._wishers.pop(index, ()):
            self._links[wisher].wishes.remove(index)
            self._promise(wisher, self._links[wisher], index)
        if not self._missing:
            self._finish()
        self._arm(now)

    def _finish(self) -> None:
        self.complete = True
        self._pulls.forget()
        for peer, link in self._links.items():
            link.notes = deque(note for note in link.notes if not isinstance(note, Want | Have))
            link.notes.append(Complete())
            self._ready[peer] = None

    def heard(self, peer: NodeId, note: Note, *, now: float) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        match note:
            case Have(bitmap=bitmap):
                both = int.from_bytes(link.theirs, "little") | int.from_bytes(bitmap[: len(link.theirs)], "little")
                link.theirs[:] = both.to_bytes(len(link.theirs), "little")
            case Complete():
                if self._whole_at is None and peer != self._learner:
                    self._whole_at = now
                link.theirs = bytearray(b"\xff" * len(link.theirs))
                link.queue.clear()
            case Want(indices=indices):
                self._take_want(peer, link, indices, now)
            case Behind(stripes=stripes) if self.complete:
                self._complaints.update(((peer, s), None) for s in stripes if s < self.stripes)
            case _:
                pass  # other notes mean nothing here

    def _take_want(self, peer: NodeId, link: _Link, indices: tuple[int, ...], now: float) -> None:
        """Send what is held now and the rest when it comes. If something is not here yet, say what is held."""
        for index in indices:
            if index < self._count and has_bit(self._held, index):
                self._promise(peer, link, index)
            elif index < self._count and len(link.wishes) < MAX_INDICES:
                link.wishes.add(index)
                self._wishers.setdefault(index, {})[peer] = None
        if link.wishes and (link.told_at is None or now - link.told_at >= HAVE_EVERY_S):
            self._tell(peer, link, now)

    def _promise(self, peer: NodeId, link: _Link, index: int) -> None:
        if index not in link.asked and len(link.asked) < MAX_INDICES:
            link.asked.append(index)
            self._ready[peer] = None

    def _tell(self, peer: NodeId, link: _Link, now: float) -> None:
        link.told_at = now
        link.notes = deque(note for note in link.notes if not isinstance(note, Have | Complete))
        link.notes.append(Complete() if self.complete else Have(bitmap=bytes(self._held)))
        self._ready[peer] = None

    # -- what goes out ---------------------------------------------------------------------------------------

    def next_for(self, peer: NodeId, *, now: float) -> Note | Send | None:
        link = self._links.get(peer)
        if link is None:
            return None
        if link.notes:
            return link.notes.popleft()
        while link.queue:
            if link.queue[0] > self._limit and not self._may_lead(link.queue[0]):
                self._ahead[peer] = None
                self._arm(now)
                break
            index = heappop(link.queue)
            if not has_bit(link.theirs, index):
                return self._give(link, index, NoteKind.FRESH)
        # Repairs come last: on a full uplink they would slow down the trees, and so cause more repairs.
        return self._give(link, link.asked.popleft(), NoteKind.COPY) if link.asked else None

    def _may_lead(self, index: int) -> bool:
        """Return True if a link may send `index` now. The limit rises as the median link moves on."""
        self._until_paced -= 1
        if self._until_paced <= 0:
            self._pace()
        return index <= self._limit

    def _pace(self) -> None:
        heads = sorted(link.queue[0] for link in self._links.values() if link.queue)
        self._until_paced = len(heads)
        if heads:
            self._limit = heads[len(heads) // 2] + LEAD_ROUNDS * self.stripes
        self._ready.update(self._ahead)
        self._ahead.clear()

    def _walk(self) -> None:
        """Raise the limit by somewhat more than the planned pace, because some link is slow or stands still."""
        step = max(LEAD_ROUNDS * self.stripes, int(WALK * self._routes.chunks_per_s * TICK_S))
        at_least = self._limit + step
        self._pace()
        self._limit = max(self._limit, at_least)

    @staticmethod
    def _give(link: _Link, index: int, kind: NoteKind) -> Send:
        set_bit(link.theirs, index)
        return Send(index, kind)

    def sent(self, peer: NodeId, send: Send, *, now: float) -> None:
        """Do nothing: a chunk counts as held by the peer from the moment it is given."""

    def ready(self) -> list[NodeId]:
        found = list(self._ready)
        self._ready.clear()
        return found

    # -- pull ------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        return self._tick_at

    def _arm(self, now: float) -> None:
        if self._tick_at is None and (not self.complete or self._ahead):
            self._tick_at = now + TICK_S

    def tick(self, *, now: float) -> None:
        if self._tick_at is None or now < self._tick_at:
            return
        self._tick_at = None
        if self._ahead:
            self._walk()
        if not self.complete and self._links:
            self._complain()
            self._pull(now)
        if self._links:
            self._arm(now)

    def complaints(self) -> list[tuple[NodeId, int]]:
        """Return and forget who fell behind in which stripe, for the learner's planner."""
        found = list(self._complaints)
        self._complaints.clear()
        return found

    def _complain(self) -> None:
        parents = self._routes.parents
        stripes = [s for s in self._pulls.behind() if parents[s] in self._links and parents[s] != self._learner]
        link = self._links.get(self._learner)
        if stripes and link is not None and len(link.notes) < MAX_NOTES:
            link.notes.append(Behind(stripes=tuple(stripes[:MAX_INDICES])))
            self._ready[self._learner] = None

    def _pull(self, now: float) -> None:
        self._pulls.expire(now=now)
        asked_of = Counter(ask.peer for ask in self._pulls.asks.values())
        wants: dict[NodeId, list[int]] = {}
        for index in self._pulls.overdue(now=now) or self._pulls.last_missing(whole_at=self._whole_at, now=now):
            peer = self._holder_of(index, asked_of)
            if peer is not None and len(self._pulls.asks) < MAX_INDICES:
                self._pulls.ask(index, peer, now=now)
                asked_of[peer] += 1
                wants.setdefault(peer, []).append(index)
        for peer, indices in wants.items():
            self.pulled += len(indices)
            self._links[peer].notes.append(Want(indices=tuple(indices)))
            self._ready[peer] = None

    def _holder_of(self, index: int, asked_of: Counter[NodeId]) -> NodeId | None:
        """Pick a holder, else a parent, else the learner, else any peer. After TRIES the learner is first."""

        def score(peer: NodeId) -> tuple[int, int, float]:
            rank = 2 if peer in self._routes.parents else 4
            if peer == self._learner:
                rank = 0 if self._pulls.exhausted(index) else 3
            elif has_bit(self._links[peer].theirs, index):
                rank = 1
            return rank, asked_of[peer], self._random.random()

        able = (p for p, link in self._links.items() if asked_of[p] < ASKED_OF_ONE and len(link.notes) < MAX_NOTES)
        return min(able, key=score, default=None)
