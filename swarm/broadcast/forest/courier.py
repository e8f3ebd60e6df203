"""One node's part in trees, of a star or of a forest.

Theory of operation. Chunk i is of stripe i mod K. A new chunk goes to the children of its stripe, through a queue for
each link in index order; a link is asked for its next frame only when it can take one, so a slow child delays nobody
but its own subtree. A child that joins, or comes back, says what it holds (Have) and is sent the rest. A child given to
this node while the transfer runs is sent new chunks at once, and what else it may lack once it has said so.

A node pulls what the trees lost, and at the end what a slow parent still has. A chunk is overdue if its stripe has no
linked parent or has been silent while others went on, or if its parent sent a later one long ago (so the chunk was
lost, or refused as wrong). The node asks (Want) a peer known to hold it, else a parent in another stripe, at last the
learner, and passes the chunk on to its children like any other. Pulls end by themselves when new routes come. Only a
few links at a time are served what they asked for, because a repair slows down the trees of others.

Bounds: an index is in a link's queue once; what a peer asked for, and what is asked of it, is at most MAX_INDICES.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from random import Random

from swarm.broadcast.notes import MAX_INDICES, Behind, Complete, Have, Kind, Note, Routing, Send, Want, has_bit, set_bit
from swarm.types import NodeId

TICK_S = 1.0  # How often what is overdue is looked for

PATIENCE_TICKS = 3
"""A chunk is missed when its parent sent a later one 3 s ago: chunks go by index, and retransmission takes less."""

ORPHAN_S = 1.0  # A stripe without a linked parent is pulled after this time; a new plan mostly comes sooner

SILENT_S = 8.0
"""A stripe whose parent is linked is pulled after this time: an orphaned parent has recovered by then."""

SILENT_INTERVALS = 8  # And after that many times its mean interval between chunks, which is what a slow swarm needs

END_SHARE = 0.03
"""If others have been whole for this share of the transfer's time, the parent of what is still missing is too slow: it
is no accident of the last chunks."""

BEHIND_S = 4.0
"""A stripe this far behind the median stripe, and falling further behind, has a parent that cannot keep up."""

BEHIND_SHARE = 0.5
"""Its pace must also be under half of the others'. Where all uplinks are full a few percent are nobody's fault, and
moving children about for that would cost more than it gains."""

BEHIND_TICKS = 3  # Ticks over which falling behind is measured; a new parent is given as many to catch up
ASK_S = 4.0  # An unanswered ask goes to another peer after this time
TRIES = 2  # Peers that are asked in vain before the learner is


@dataclass(frozen=True, slots=True)
class Ask:
    """A chunk that `peer` was asked for."""

    peer: NodeId
    until: float


class Pulls:
    """Progress by stripe, and at most MAX_INDICES asks under way. `held` is the owner's bitmap, which is only read."""

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
        """The first link is up: silence counts from now on."""
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
        """Asks that were not answered in time."""
        late = [index for index, ask in self.asks.items() if ask.until <= now]
        for index in late:
            self._tries[index] = self._tries.get(index, 0) + 1
        return late

    def exhausted(self, index: int) -> bool:
        """Whether enough peers were asked in vain for the learner to be asked."""
        return self._tries.get(index, 0) >= TRIES

    def forget(self) -> None:
        self.asks.clear()
        self._tries.clear()

    def overdue(self, linked: Sequence[bool], *, now: float) -> list[int]:
        """At most MAX_INDICES chunks that are missing, late and not asked for, in index order. `linked` says which
        stripes have a linked parent.

        Call it once a tick: it remembers how far each stripe was PATIENCE_TICKS ago.
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
        """Stripes whose parents cannot keep up. Call it once a tick."""
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
        """Chunks that are missing and not asked for, if somebody else has been whole for long. The last come first,
        because the parents send the first of them meanwhile."""
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


ASKED_OF_ONE = 16  # Asked of one peer at a time: 1 MiB of 64 KiB chunks

MAX_NOTES = 2
"""Notes that may wait for a link before it is asked for more; the newest note on what is held may come on top."""

MAX_COPYING = 4  # Links that are served what they asked for at a time
HAVE_EVERY_S = 1.0  # Bitmaps sent in answer to one peer's vain questions

LEAD_ROUNDS = 4
"""Chunks of each stripe by which a link may be ahead of the others. Sockets share an uplink evenly, but a child in two
stripes needs twice as much: without this some stripes were at 60 % of others, and all took 1.27 times as long."""

WALK = 1.4
"""Multiple of the planned pace at which links go on when another holds them up. With 100 peers this takes 1.13 of the
bound; waiting for half of the links took 1.26, for all 1.98. Below the planned pace a stalled child holds up all."""

BACKLOG_S = 2.0  # How long a new child's word about what it holds is waited for


@dataclass(slots=True)
class _Link:
    """The state of one link. Bit i of `theirs` is set if the peer says it has chunk i, sent it or was sent it."""

    leaf: bool
    theirs: bytearray
    complete: bool = False
    heard_at: float | None = None
    told_at: float | None = None
    notes: deque[Note] = field(default_factory=deque)
    queue: list[int] = field(default_factory=list)
    asked: deque[int] = field(default_factory=deque)
    wishes: dict[int, None] = field(default_factory=dict)
    copying: bool = False
    backlog: dict[int, float] = field(default_factory=dict)
    pending: int = 0


class TreeCourier:
    """A Courier for static routes. `held` is a bitmap as in Have; the learner holds everything."""

    def __init__(
        self, *, count: int, learner: NodeId, routes: Routing, held: bytes = b"", whole: bool = False, random: Random
    ) -> None:
        assert count >= 1
        self._count = count
        self._learner = learner
        self._random = random
        self._routes = routes
        self._links: dict[NodeId, _Link] = {}
        self._ready: dict[NodeId, None] = {}
        self._held = bytearray((count + 7) // 8)
        self._missing = 0 if whole else count
        if whole:
            self._held = _full(count)
        for index in range(count) if held and not whole else ():
            if has_bit(held, index):
                self._keep(index)
        self.complete = self._missing == 0
        self.duplicates = 0
        self.pulled = 0
        self.stripes = len(routes.parents)
        self._pulls = Pulls(count=count, stripes=self.stripes, held=self._held)
        self._wishers: dict[int, list[NodeId]] = {}
        self._copying = 0
        self._limit = LEAD_ROUNDS * self.stripes
        self._until_paced = 0
        self._ahead: dict[NodeId, None] = {}
        self._tick_at: float | None = None
        self._whole_at: float | None = None
        self._complaints: dict[tuple[NodeId, int], None] = {}

    # -- routes and links ------------------------------------------------------------------------------------

    def set_routes(self, routes: Routing, *, now: float) -> None:
        """Take a new plan of as many stripes. Tell new parents what is held, send new children what they lack."""
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
                if child not in old.children[stripe]:
                    self._adopt(child, stripe, now)

    def _release(self, child: NodeId, stripe: int) -> None:
        link = self._links.get(child)
        if link is not None:
            link.queue = [index for index in link.queue if index % self.stripes != stripe]
            heapify(link.queue)
            link.backlog.pop(stripe, None)

    def _adopt(self, child: NodeId, stripe: int, now: float) -> None:
        link = self._links.get(child)
        if link is None:
            return
        if link.heard_at is not None and now - link.heard_at < BACKLOG_S:
            self._enqueue_stripe(child, link, stripe)
        else:
            link.backlog[stripe] = now + BACKLOG_S
            self._arm(now)

    def _enqueue_stripe(self, child: NodeId, link: _Link, stripe: int) -> None:
        queued = set(link.queue)
        for index in range(stripe, self._count, self.stripes):
            if has_bit(self._held, index) and not has_bit(link.theirs, index) and index not in queued:
                link.queue.append(index)
        heapify(link.queue)
        self._ready[child] = None

    def join(self, peer: NodeId, *, leaf: bool, now: float) -> None:
        assert peer not in self._links
        link = self._links[peer] = _Link(leaf, bytearray((self._count + 7) // 8))
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
        if link is None:
            return
        if link.copying:
            self._end_copy(link)
        for index in link.wishes:
            self._wishers[index].remove(peer)
        for index in [index for index, ask in self._pulls.asks.items() if ask.peer == peer]:
            del self._pulls.asks[index]
        for stripe, parent in enumerate(self._routes.parents):
            if parent == peer:
                self._pulls.restart(stripe, now=now)
        self._arm(now)

    # -- what comes in ---------------------------------------------------------------------------------------

    def arrived(self, peer: NodeId, index: int, kind: Kind, via: NodeId | None, *, now: float) -> None:
        if not 0 <= index < self._count:
            return
        link = self._links.get(peer)
        if link is not None:
            set_bit(link.theirs, index)
        from_parent = kind is Kind.FRESH and self._routes.parents[index % self.stripes] == peer
        self._pulls.arrived(index, from_parent=from_parent, now=now)
        self._settle_ask(index)
        if has_bit(self._held, index):
            self.duplicates += 1
            return
        self._keep(index)
        self._pass_on(index)
        if not self._missing:
            self._finish()
        self._arm(now)

    def _keep(self, index: int) -> None:
        set_bit(self._held, index)
        self._missing -= 1

    def _pass_on(self, index: int) -> None:
        for child in self._routes.children[index % self.stripes]:
            link = self._links.get(child)
            if link is not None and not link.complete and not has_bit(link.theirs, index):
                heappush(link.queue, index)
                self._ready[child] = None
        for peer in self._wishers.pop(index, ()):
            link = self._links[peer]
            del link.wishes[index]
            if len(link.asked) < MAX_INDICES:
                link.asked.append(index)
                self._ready[peer] = None

    def _finish(self) -> None:
        self.complete = True
        self._pulls.forget()
        for peer, link in self._links.items():
            link.pending = 0
            link.notes = deque(note for note in link.notes if not isinstance(note, Want | Have))
            link.notes.append(Complete())
            self._ready[peer] = None

    def heard(self, peer: NodeId, note: Note, *, now: float) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        match note:
            case Have(bitmap=bitmap):
                for at, byte in enumerate(bitmap[: len(link.theirs)]):
                    link.theirs[at] |= byte
                self._hear_what_it_holds(peer, link, now)
            case Complete():
                link.complete = True
                if self._whole_at is None and peer != self._learner:
                    self._whole_at = now
                link.theirs = _full(self._count)
                link.queue.clear()
                self._hear_what_it_holds(peer, link, now)
            case Want(indices=indices):
                self._take_want(peer, link, indices, now)
            case Behind(stripes=stripes) if self.complete:
                self._complaints.update(((peer, s), None) for s in stripes if s < self.stripes)
            case _:
                pass  # of the mesh: it has no meaning here, and costs nothing

    def _hear_what_it_holds(self, peer: NodeId, link: _Link, now: float) -> None:
        link.heard_at = now
        for stripe in list(link.backlog):
            del link.backlog[stripe]
            self._enqueue_stripe(peer, link, stripe)

    def _take_want(self, peer: NodeId, link: _Link, indices: tuple[int, ...], now: float) -> None:
        """Send what is held now and the rest when it comes, and tell the asker what is held."""
        for index in indices:
            if index < self._count and index not in link.asked and index not in link.wishes:
                if has_bit(self._held, index) and len(link.asked) < MAX_INDICES:
                    link.asked.append(index)
                elif not has_bit(self._held, index) and len(link.wishes) < MAX_INDICES:
                    link.wishes[index] = None
                    self._wishers.setdefault(index, []).append(peer)
        if link.wishes and (link.told_at is None or now - link.told_at >= HAVE_EVERY_S):
            self._tell(peer, link, now)
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
        if link.asked and not link.copying and self._copying < MAX_COPYING:
            link.copying = True
            self._copying += 1
            return self._give(link, link.asked.popleft(), Kind.COPY)
        while link.queue:
            if link.queue[0] > self._limit and not self._may_lead(link.queue[0]):
                self._ahead[peer] = None
                self._arm(now)
                return None
            index = heappop(link.queue)
            if not has_bit(link.theirs, index):
                return self._give(link, index, Kind.FRESH)
        return None

    def _may_lead(self, index: int) -> bool:
        """Whether a link may send `index` now. The limit rises when all links have come up to it."""
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
        """Some link is slow or stands still: let the others go on at somewhat more than the planned pace."""
        step = max(LEAD_ROUNDS * self.stripes, int(WALK * self._routes.chunks_per_s * TICK_S))
        at_least = self._limit + step
        self._pace()
        self._limit = max(self._limit, at_least)

    @staticmethod
    def _give(link: _Link, index: int, kind: Kind) -> Send:
        set_bit(link.theirs, index)
        return Send(index, kind)

    def sent(self, peer: NodeId, send: Send, *, now: float) -> None:
        link = self._links.get(peer)
        if link is not None and link.copying and send.kind is Kind.COPY:
            self._end_copy(link)

    def _end_copy(self, link: _Link) -> None:
        link.copying = False
        self._copying -= 1
        for peer, waiting in self._links.items():
            if waiting.asked:
                self._ready[peer] = None

    def ready(self) -> list[NodeId]:
        found = list(self._ready)
        self._ready.clear()
        return found

    # -- pull ------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        return self._tick_at

    def _arm(self, now: float) -> None:
        waiting = not self.complete or self._ahead or any(link.backlog for link in self._links.values())
        if self._tick_at is None and waiting:
            self._tick_at = now + TICK_S

    def tick(self, *, now: float) -> None:
        if self._tick_at is None or now < self._tick_at:
            return
        self._tick_at = None
        for peer, link in self._links.items():
            for stripe in [stripe for stripe, until in link.backlog.items() if until <= now]:
                del link.backlog[stripe]
                self._enqueue_stripe(peer, link, stripe)
        if self._ahead:
            self._walk()
        if not self.complete and self._links:
            self._complain()
            self._pull(now)
        if self._links:
            self._arm(now)

    def _settle_ask(self, index: int) -> None:
        ask = self._pulls.asks.pop(index, None)
        link = self._links.get(ask.peer) if ask is not None else None
        if link is not None:
            link.pending -= 1

    def complaints(self) -> list[tuple[NodeId, int]]:
        """Who fell behind in which stripe since the last call, for the learner's planner."""
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
        for index in self._pulls.expired(now=now):
            self._settle_ask(index)
        wants: dict[NodeId, list[int]] = {}
        overdue = self._pulls.overdue([parent in self._links for parent in self._routes.parents], now=now)
        for index in overdue or self._pulls.last_missing(whole_at=self._whole_at, now=now):
            peer = self._holder_of(index)
            if peer is not None and len(self._pulls.asks) < MAX_INDICES:
                self._pulls.ask(index, peer, now=now)
                self._links[peer].pending += 1
                wants.setdefault(peer, []).append(index)
        for peer, indices in wants.items():
            self.pulled += len(indices)
            self._links[peer].notes.append(Want(indices=tuple(indices)))
            self._ready[peer] = None

    def _holder_of(self, index: int) -> NodeId | None:
        """Whom to ask: a holder, else a peer that may become one, the learner last; after TRIES the learner at once."""
        best: tuple[int, int, float] | None = None
        chosen = None
        exhausted = self._pulls.exhausted(index)
        for peer, link in self._links.items():
            if link.pending >= ASKED_OF_ONE or len(link.notes) >= MAX_NOTES:
                continue
            if peer == self._learner:
                rank = 0 if exhausted else 3
            elif has_bit(link.theirs, index):
                rank = 1
            else:
                rank = 2 if peer in self._routes.parents else 4
            score = (rank, link.pending, self._random.random())
            if best is None or score < best:
                best, chosen = score, peer
        return chosen


def _full(count: int) -> bytearray:
    """A bitmap of `count` ones."""
    bitmap = bytearray(b"\xff" * (count // 8))
    if count % 8:
        bitmap.append((1 << count % 8) - 1)
    return bitmap
