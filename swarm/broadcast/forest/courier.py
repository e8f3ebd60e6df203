"""One node's part in the trees of a star or a forest.

Theory of operation. Chunk i belongs to stripe i mod K. The node queues a new chunk for the children of its stripe, one
queue for each link, in index order. A link is asked for its next frame only when it can take one, so a slow child
delays only its own subtree. A child that joins, comes back, or gets this node as its parent in a new plan says what it
holds (Have) and is sent the rest.

A plan believes in uplinks that differ from the true ones, so some parents lag and others have uplink to spare. A node
with nothing to send offers help: it says what it holds. A node asks such helpers (Want) for chunks of stripes that lag,
passes them on to its children like any other, and tells its parents what it holds now, which they need not send. A
parent with a backlog gives each child chunks that it gave nobody yet, so that helpers get what nobody else can give.

A node also pulls what the trees lost: chunks of a stripe that has been silent for too long (sooner if its parent is not
linked). It asks a peer known to hold the chunk, else a parent in another stripe, else the learner. A peer that lacks
what it is asked for says what it holds. What a parent passed over, and what was wrong, is asked for at the end. Pulls
end by themselves when new routes come.

Bounds: an index is in a link's queue once. For each peer at most MAX_INDICES requests wait for the link. This node has
at most MAX_INDICES open asks in all.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from random import Random

from swarm.broadcast.forest.pulls import ASK_S, TICK_S, Pulls
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

ASKED_OF_ONE = 16  # Chunks asked of one peer at a time: 1 MiB of 64 KiB chunks

ASKED_OF_HELPER = 2  # Chunks asked of one helper at a time: others ask it too
HELPED_AT_ONCE = 4  # Linked peers, drawn by lot, to whom a node with nothing to send offers help in each tick
OFFER_S = 2.5  # An offer counts for so long, or from the helper's last chunk on

FIRST_ASKS = 8  # of all helpers at once; each copy that was needed allows one more
IN_VAIN = 2
"""Asks fewer at once for each chunk that comes twice. Where a node's own downlink binds, its stripes lag too, and
helpers send at its parents' cost: without this, 12 nodes with unlike downlinks took 1.15 times as long."""

BACKLOG = 8  # With more chunks waiting, a link is given one that nobody was given yet, if there is one
BACKLOG_SCAN = 32  # among so many of the newest

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
    """The state of one link. Bit i of `theirs` is set if the peer says it has chunk i, sent it or was sent it. It is
    asked to help until `helps_until`."""

    theirs: bytearray
    helps_until: float = -inf
    told_at: float | None = None
    notes: deque[Note] = field(default_factory=deque)
    queue: list[int] = field(default_factory=list)
    asked: dict[int, float] = field(default_factory=dict)


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
        self._pulls.chunks_per_s = routes.chunks_per_s
        self._limit = LEAD_ROUNDS * self.stripes
        self._until_paced = 0
        self._ahead: dict[NodeId, None] = {}
        self._tick_at: float | None = None
        # How often each chunk was given to somebody, up to 255; what is held at the start counts as given once.
        self._given = bytearray(has_bit(self._held, index) for index in range(count))
        self._late: list[int] = []
        self._asks_of_helpers = FIRST_ASKS
        self._helped: set[int] = set()
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
        self._pulls.chunks_per_s = routes.chunks_per_s
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
                self._count_given(index)
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
        self._links.pop(peer, None)
        self._ready.pop(peer, None)
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
        asked = self._pulls.asks.pop(index, None)
        if asked is not None and link is not None and asked.peer == peer:
            link.helps_until = max(link.helps_until, now + OFFER_S)
            self._ask_helper(peer, link, now)
        if has_bit(self._held, index):
            self._asks_of_helpers = max(1, self._asks_of_helpers - IN_VAIN)
            return
        if kind is NoteKind.COPY:
            self._asks_of_helpers = min(MAX_INDICES, self._asks_of_helpers + 1)
        set_bit(self._held, index)
        self._missing -= 1
        if not from_parent:
            self._helped.add(index % self.stripes)
        for child in self._routes.children[index % self.stripes]:
            link = self._links.get(child)
            if link is not None and not has_bit(link.theirs, index):
                heappush(link.queue, index)
                self._ready[child] = None
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
                link.helps_until = now + OFFER_S
                self._ask_helper(peer, link, now)
            case Complete():
                link.theirs = bytearray(b"\xff" * len(link.theirs))
                link.queue.clear()
                link.helps_until = inf
                self._ask_helper(peer, link, now)
            case Want(indices=indices):
                self._take_want(peer, link, indices, now)
            case Behind(stripes=stripes) if self.complete:
                self._complaints.update(((peer, s), None) for s in stripes if s < self.stripes)
            case _:
                pass  # other notes mean nothing here

    def _take_want(self, peer: NodeId, link: _Link, indices: tuple[int, ...], now: float) -> None:
        """Send what is held. If something is not here yet, say what is, at most every HAVE_EVERY_S."""
        held = [index for index in indices if index < self._count and has_bit(self._held, index)]
        for index in held:
            if index in link.asked or len(link.asked) < MAX_INDICES:
                link.asked[index] = now
        if len(held) < len(indices) and (link.told_at is None or now - link.told_at >= HAVE_EVERY_S):
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
        if len(link.queue) > BACKLOG and (new := self._given_to_nobody(link)) is not None:
            return self._give(link, new, NoteKind.FRESH)
        while link.queue:
            if link.queue[0] > self._limit and not self._may_lead(link.queue[0]):
                self._ahead[peer] = None
                self._arm(now)
                break
            index = heappop(link.queue)
            if not has_bit(link.theirs, index):
                return self._give(link, index, NoteKind.FRESH)
        # Repairs come last: on a full uplink they would slow down the trees, and so cause more repairs. What was given
        # least comes first: those who got the rest can help one another.
        while link.asked:
            index = min(link.asked, key=self._given.__getitem__)
            if now - link.asked.pop(index) < ASK_S:
                return self._give(link, index, NoteKind.COPY)
        return None

    def _given_to_nobody(self, link: _Link) -> int | None:
        """Return one of the newest chunks that wait for this link, if this node has given it to nobody yet."""
        newest = reversed(link.queue[-BACKLOG_SCAN:])
        return next((i for i in newest if not self._given[i] and not has_bit(link.theirs, i)), None)

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

    def _give(self, link: _Link, index: int, kind: NoteKind) -> Send:
        self._count_given(index)
        set_bit(link.theirs, index)
        return Send(index, kind)

    def _count_given(self, index: int) -> None:
        self._given[index] = min(255, self._given[index] + 1)

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
            self._offer(now)
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
        for index in self._pulls.overdue(now=now):
            peer = self._holder_of(index, asked_of)
            if peer is not None and len(self._pulls.asks) < MAX_INDICES:
                self._pulls.ask(index, peer, now=now)
                asked_of[peer] += 1
                wants.setdefault(peer, []).append(index)
        for peer, indices in wants.items():
            self._want(peer, indices)
        self._late = self._pulls.late()
        self._late.sort(reverse=True)  # What a parent sends last is the least likely to come twice.
        for peer, link in self._links.items():
            self._ask_helper(peer, link, now)

    def _want(self, peer: NodeId, indices: list[int]) -> None:
        self.pulled += len(indices)
        self._links[peer].notes.append(Want(indices=tuple(indices)))
        self._ready[peer] = None

    def _offer(self, now: float) -> None:
        """Say what is held if nothing waits to be sent. Tell the parents of stripes that helpers gave something of."""
        told = {self._routes.parents[stripe] for stripe in self._helped}
        self._helped.clear()
        if self._missing < self._count and not any(link.queue or link.asked for link in self._links.values()):
            others = [peer for peer, link in self._links.items() if peer != self._learner and link.helps_until < inf]
            told.update(self._random.sample(others, min(HELPED_AT_ONCE, len(others))))
        for peer in sorted(told & self._links.keys()):
            self._tell(peer, self._links[peer], now)

    def _ask_helper(self, peer: NodeId, link: _Link, now: float) -> None:
        """Ask a peer that offers help for chunks of stripes that lag. Ask the learner at the end, while nobody else is
        asked: perhaps a parent stands still that alone has them."""
        asks, late = self._pulls.asks, self._late
        room = min(self._asks_of_helpers - len(asks), ASKED_OF_HELPER - sum(ask.peer == peer for ask in asks.values()))
        if link.helps_until < now or room <= 0 or len(link.notes) >= MAX_NOTES:
            return
        if peer == self._learner:
            if asks or not self._pulls.ending:
                return
            late = self._random.sample(late, len(late))  # Or all would ask it for the same.
        indices: list[int] = []
        for index in late:
            if len(indices) == room:
                break
            known = has_bit(self._held, index) or index in asks
            if not known and has_bit(link.theirs, index) and self._routes.parents[index % self.stripes] != peer:
                self._pulls.ask(index, peer, now=now)
                indices.append(index)
        if indices:
            self._want(peer, indices)

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
