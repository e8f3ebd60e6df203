"""A receiver's part in a mesh of depth two: forward the chunks that the seeder deals to it, and ask for missing ones.

Theory of operation (Mutualcast; the rules were found by measurement, docs/broadcast.md). The seeder deals every chunk
to one receiver, which sends it over all its links. A receiver's share of the chunks follows from its credit: it grants
the seeder one chunk whenever the copies in its queues, per child, and the chunks on their way to it are together fewer
than its window. The window grows while the queues run dry and shrinks while one stands. It counts the sum of the
queues, so that one slow child does not slow down the others. A leaf has links to publics only. It sends its chunks to
these, and the seeder names one of them to forward each chunk to the other leaves; forward credit works the same way.

What a peer says affects this transfer only, and a lie costs time, never bytes (I2 is the shell's).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from swarm.broadcast.notes import (
    MAX_INDICES,
    AllDealt,
    Complete,
    Credit,
    Have,
    Note,
    NoteKind,
    Recall,
    Send,
    Want,
    has_bit,
    set_bit,
)
from swarm.types import NodeId

STARVED = 0.3  # With fewer copies than this per child waiting, the next chunk could have come sooner
STANDING = 3.0
STANDING_S = 0.03
"""A queue that stayed longer than both of these (in chunks, and in seconds of sending) throughout the last interval
only adds delay. Arrivals are no time to measure it, because each burst of arrivals makes a queue."""

LONGEST_S = 0.6
"""A window holds no more than a forwarder sends in this time: chunks that wait cannot be dealt to a faster one."""

ENDING_S = 1.0
LAST_SHARE = 0.3
"""In the last ENDING_S a window shrinks to this share of the time left, so that all queues run empty at once."""


class Window:
    """Credit granted by a forwarder. `out` chunks were granted and have not arrived. Sizes are in chunks per child."""

    def __init__(self, *, start: int, least: int, floor: int) -> None:
        self.size = start
        self.out = 0
        self._least = least
        self._floor = floor
        self._shortest = math.inf

    def arrived(self, waiting: float, backlog: float | None = None) -> None:
        """Count a chunk that came while `waiting` copies of this kind, and `backlog` of all kinds, waited per child."""
        self.out = max(0, self.out - 1)
        if (waiting if backlog is None else backlog) < STARVED:
            self.size += 1

    def grant(self, waiting: float, rate: float, left_s: float = math.inf) -> int:
        """Return how many more chunks to grant. `rate` is in chunks/s to each child, `left_s` the time left."""
        self._shortest = min(self._shortest, waiting)
        self.size = min(self.size, max(self._floor, int(LONGEST_S * rate)))
        if left_s < ENDING_S:
            self.size = min(self.size, max(self._least, math.ceil(LAST_SHARE * left_s * rate)))
        more = max(0, math.ceil(self.size - waiting - self.out))
        self.out += more
        return more

    def settle(self, rate: float) -> None:
        """End an interval. The forwarder calls this once a tick."""
        if self._shortest > max(STANDING, STANDING_S * rate) and self._shortest < math.inf:
            self.size = max(self._least, self.size - 1)
        self._shortest = math.inf


Duty = list[int]  # [index, sends left, 1 if it is a forward], shared by the queue entries of one chunk
Entry = tuple[int, NoteKind, Duty]  # A waiting send: the chunk, what the child does with it, and its duty
STALLED_QUEUE = 8
QUICK = 4.0
DEAD_SHARE = 0.1
"""A child that gets under a tenth of the average over a quarter of a second is stalled too: until it is set aside, its
queue holds up the forwarder, and with that everybody."""

STALLED_SHARE = 0.25
"""A child is stalled if its queue is longer than STALLED_QUEUE and it gets under a quarter of the average rate. A
moving average over a second tells that from bad luck. A connection that only starts slowly gets more."""

KEPT_UP_TICKS = 3
"""A stalled child is offered half of the average rate. Once it takes that for more ticks than this, it is normal."""


@dataclass(slots=True, eq=False)
class TreeChild:
    """One link to another receiver."""

    leaf: bool
    queue: deque[Entry] = field(default_factory=deque)
    deferred: deque[int] = field(default_factory=deque)
    wanted: deque[int] = field(default_factory=deque)
    notes: deque[Note] = field(default_factory=deque)
    busy: Duty | None = None
    forwards: int = 0
    stalled: bool = False
    offered: int = 0
    kept_up: int = 0
    arrivals: int = 0
    asked: int = 0
    complete: bool = False
    has: bytearray = field(default_factory=bytearray)
    sent: int = 0
    rate: float = 0.0
    quick_rate: float = 0.0

    def holds(self, index: int) -> bool:
        return self.complete or has_bit(self.has, index)

    def put(self, entry: Entry) -> None:
        """Queue a send. Chunks that the child has to forward go before copies, because others wait for them."""
        place = len(self.queue)
        if entry[1] is NoteKind.FORWARD:
            place = next((i for i, waiting in enumerate(self.queue) if waiting[1] is not NoteKind.FORWARD), place)
        self.queue.insert(place, entry)
        self.forwards += entry[2][2]

    def take(self) -> Entry:
        entry = self.queue.popleft()
        self.forwards -= entry[2][2]
        return entry

    def drop(self, recalled: Collection[int] | None = None) -> list[Entry]:
        """Remove and return the sends of the chunks in `recalled`; None means all."""
        dropped = [entry for entry in self.queue if recalled is None or entry[0] in recalled]
        self.queue = deque(entry for entry in self.queue if recalled is not None and entry[0] not in recalled)
        self.forwards = sum(entry[2][2] for entry in self.queue)
        return dropped

    def note(self, index: int, nbytes: int) -> None:
        """Note that the child has chunk `index` of a version whose bitmaps have `nbytes`."""
        if len(self.has) < nbytes:
            self.has.extend(bytes(nbytes - len(self.has)))
        set_bit(self.has, index)

    def measure(self, elapsed: float, weight: float) -> None:
        """Update the averages of chunks/s sent to it: over a second (with `weight`) and over a quarter of a second."""
        rate, self.sent = self.sent / elapsed, 0
        self.rate += weight * (rate - self.rate)
        self.quick_rate += min(1.0, QUICK * weight) * (rate - self.quick_rate)

    def is_stalling(self, fair: float) -> bool:
        """Return True if its queue is long and it takes hardly anything, while the others get `fair` on average."""
        slow = self.rate < STALLED_SHARE * fair or self.quick_rate < DEAD_SHARE * fair
        return slow and len(self.queue) > STALLED_QUEUE

    def offer(self, chunks: float) -> None:
        """Offer a stalled child what it may take until the next tick. Call this every tick."""
        self.kept_up = self.kept_up + 1 if self.offered <= 0 or not self.deferred else 0
        self.offered = math.ceil(chunks)
        if self.kept_up > KEPT_UP_TICKS:
            self.stalled = False


TICK_S = 0.1  # How often rates are measured and missing chunks asked for
RATE_S = 1.0  # Rates are moving averages over about this time

DEFERRED_EVERY = 2
"""One in this many chunks to a child is one that it missed while stalled. Where a queue is never empty, those would
otherwise wait for the end, and everybody with them."""

LONGEST_WINDOWS = 2
"""A child's queue counts as at most this many windows. Otherwise a link that TCP slowed down after a loss would use up
the window, and the forwarder would go at that link's pace with all others idle."""

QUIET_S = 2.0
"""A receiver that got no chunk for this long asks for missing ones, because the seeder may be dead."""

ASK_AGAIN_S = 1.0
"""A chunk that did not come within this time is asked for again: longer than a round trip and a queue."""


class Forwarder:
    """A Courier for one receiver. `have` is the bitmap of the chunks it already holds. A `leaf` only dials out."""

    def __init__(self, seeder: NodeId, count: int, *, leaf: bool, now: float, have: bytes = b"") -> None:
        self._seeder = seeder
        self._count = count
        self._leaf = leaf
        self._have = bytearray(have.ljust(-(-count // 8), b"\0"))
        self._missing = count - sum(has_bit(have, i) for i in range(count))
        self._children: dict[NodeId, TreeChild] = {}
        self._leaf_children = 0
        self._to_seeder: deque[Note] = deque()
        self._linked = False
        self._copies = Window(start=4, least=1, floor=4)
        self._forwards = Window(start=8, least=2, floor=8)
        self._queued_copies = 0
        self._epoch = 0
        self._granted = [0, 0]
        self._relayed: list[int] = []
        self._forwarded: dict[int, None] = {}
        self._done: tuple[list[int], list[int]] = ([], [])
        self._all_dealt = False
        self._asked: dict[int, tuple[NodeId, float]] = {}
        self._cursor = 0
        self._tries = 0
        self._arrived_at = now
        self._ticked_at = now
        self._rate = 0.0
        self._fresh_rate = 0.0
        self._fresh = 0
        self._arrival_rate = 0.0
        self._new = 0
        self._measured_s = 0.0
        self._dirty: dict[NodeId, None] = {}
        self.complete = self._missing == 0

    # -- links -----------------------------------------------------------------------------------------------

    def join(self, peer: NodeId, *, leaf: bool, now: float) -> None:
        news: list[Note] = [Complete()] if self.complete else []
        if not self.complete and self._missing < self._count:
            news = [Have(bitmap=bytes(self._have))]
        if peer == self._seeder:
            self._linked = True
            # The other end starts counting from zero.
            self._epoch = 0
            self._copies.out = self._forwards.out = 0
            self._granted = [0, 0]
            self._to_seeder = deque(news)
        else:
            child = self._children[peer] = TreeChild(leaf)
            self._leaf_children += leaf
            child.notes.extend(news)
            # The peer came too late for these, and nobody else was told to send them to it.
            child.deferred.extend(self._relayed if not leaf else [*self._relayed, *self._forwarded])
        self._dirty[peer] = None
        self._grant()

    def leave(self, peer: NodeId, *, now: float) -> None:
        if peer == self._seeder:
            self._linked = False
            return
        child = self._children.pop(peer, None)
        self._dirty.pop(peer, None)
        if child is None:
            return
        self._leaf_children -= child.leaf
        self._unqueue(child)
        self._discharge(child.busy)
        self._asked = {index: ask for index, ask in self._asked.items() if ask[0] != peer}
        self._grant()

    # -- what comes ------------------------------------------------------------------------------------------

    def arrived(self, peer: NodeId, index: int, kind: NoteKind, via: NodeId | None, *, now: float) -> None:
        self._arrived_at = now
        self._keep(peer, index)
        if kind is NoteKind.FRESH and peer == self._seeder:
            self._fresh += 1
            self._copies.arrived(self._usual_backlog())
            self._relay(index, via)
        elif kind is NoteKind.FORWARD and (source := self._children.get(peer)) is not None and source.leaf:
            leaves = [c for c in self._leaves() if c is not source]
            self._forwards.arrived(self._forwards_waiting(), self._usual_backlog())
            # Only once: a leaf that repeats a chunk must not make this node send it to all leaves again.
            self._queue(index, [] if index in self._forwarded else [(c, NoteKind.COPY) for c in leaves], forward=True)
            self._forwarded[index] = None
        if self._asked and len(self._asked) < MAX_INDICES // 2:
            self._ask(now)
        self._grant()

    def heard(self, peer: NodeId, note: Note, *, now: float) -> None:
        if isinstance(note, Recall | AllDealt):
            if peer == self._seeder:
                self._obey(note)
            return
        if (child := self._children.get(peer)) is None:
            return
        match note:
            case Have(bitmap=bitmap):
                child.has = bytearray(bitmap[: len(self._have)])
            case Complete():
                child.complete = True
                self._unqueue(child)
                self._grant()
            case Want(indices=indices):
                self._promise(child, indices)
                self._dirty[peer] = None
            case _:
                pass  # credit is for the seeder

    # -- what goes -------------------------------------------------------------------------------------------

    def next_for(self, peer: NodeId, *, now: float) -> Note | Send | None:
        if peer == self._seeder:
            return self._next_note() if self._linked else None
        child = self._children.get(peer)
        if child is None:
            return None
        if child.notes:
            return child.notes.popleft()
        if child.sent % DEFERRED_EVERY == 0 and (deferred := self._next_deferred(child)) is not None:
            return deferred
        while child.queue:
            index, kind, duty = child.take()
            if child.holds(index) and kind is not NoteKind.FORWARD:
                self._discharge(duty)
                continue
            child.busy = duty
            return Send(index, kind)
        if child.wanted:
            return Send(child.wanted.popleft(), NoteKind.COPY)
        return self._next_deferred(child)

    def _next_deferred(self, child: TreeChild) -> Send | None:
        """Return a chunk that the child missed while stalled. If it still is, an offer or idle queues must allow it."""
        while child.deferred and (not child.stalled or child.offered > 0 or not self._queued_copies):
            index = child.deferred.popleft()
            if not child.holds(index):
                child.offered -= 1
                return Send(index, NoteKind.COPY)
        return None

    def sent(self, peer: NodeId, send: Send, *, now: float) -> None:
        if (child := self._children.get(peer)) is None:
            return
        child.sent += 1
        duty, child.busy = child.busy, None
        if duty is not None:
            self._discharge(duty)
            self._grant()

    def ready(self) -> list[NodeId]:
        peers = list(self._dirty)
        self._dirty.clear()
        return peers

    def deadline(self) -> float | None:
        return self._ticked_at + TICK_S

    def tick(self, *, now: float) -> None:
        elapsed = max(now - self._ticked_at, 1e-3)
        self._ticked_at = now
        self._measure(elapsed)
        self._defer_stalled(elapsed)
        if not self.complete and (self._all_dealt or now - self._arrived_at > QUIET_S):
            self._ask(now)
        if not self._queued_copies:
            self._dirty.update((peer, None) for peer, child in self._children.items() if child.deferred)
        self._grant()

    # -- chunks ----------------------------------------------------------------------------------------------

    def _keep(self, peer: NodeId, index: int) -> None:
        if (child := self._children.get(peer)) is not None:
            child.arrivals += 1
            child.note(index, len(self._have))
        self._asked.pop(index, None)
        if has_bit(self._have, index):
            return
        set_bit(self._have, index)
        self._missing -= 1
        self._new += 1
        if self._missing == 0:
            self.complete = True
            self._tell_all(Complete())

    def _relay(self, index: int, via: NodeId | None) -> None:
        self._relayed.append(index)
        copies = [
            (c, NoteKind.FORWARD if self._leaf and peer == via else NoteKind.COPY) for peer, c in self._children.items()
        ]
        self._queue(index, copies, forward=False)

    def _queue(self, index: int, copies: list[tuple[TreeChild, NoteKind]], *, forward: bool) -> None:
        duty: Duty = [index, 0, int(forward)]
        for child, kind in copies:
            if child.holds(index) and kind is NoteKind.COPY:
                continue
            if child.stalled:
                child.deferred.append(index)
                continue
            child.put((index, kind, duty))
            duty[1] += 1
        self._queued_copies += duty[1]
        self._dirty.update(dict.fromkeys(self._children))
        if not duty[1]:
            self._report(duty)

    def _discharge(self, duty: Duty | None) -> None:
        """Count one send of `duty` as done, or as never to be done."""
        if duty is None:
            return
        self._queued_copies -= 1
        duty[1] -= 1
        if duty[1] == 0:
            self._report(duty)

    def _report(self, duty: Duty) -> None:
        self._done[duty[2]].append(duty[0])
        self._dirty[self._seeder] = None

    def _unqueue(self, child: TreeChild) -> None:
        for _, _, duty in child.drop():
            self._discharge(duty)
        child.deferred.clear()
        child.wanted.clear()

    def _promise(self, child: TreeChild, indices: tuple[int, ...]) -> None:
        for index in indices:
            if has_bit(self._have, index) and len(child.wanted) < MAX_INDICES and index not in child.wanted:
                child.wanted.append(index)

    def _obey(self, note: Recall | AllDealt) -> None:
        if isinstance(note, AllDealt):
            if not self._all_dealt and not self.complete:
                self._tell_all(Have(bitmap=bytes(self._have)))
            self._all_dealt = True
            return
        self._epoch = note.epoch
        self._copies.out = self._forwards.out = 0
        self._granted = [0, 0]
        recalled = set(note.indices)
        for index in recalled:
            self._forwarded.pop(index, None)
        for child in self._children.values():
            for _, _, duty in child.drop(recalled):
                self._discharge(duty)
        self._grant()

    # -- credit ----------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Grant the seeder credit. Without children a chunk is done on arrival, so only chunks on their way count."""
        if not self._linked:
            return
        children = max(1, len(self._children))
        rate = max(self._rate / children, self._fresh_rate)
        self._granted[0] += self._copies.grant(self._backlog(), rate, self._left_s())
        leaves = self._leaf_children - 1
        if leaves > 0 and not self._leaf:
            self._granted[1] += self._forwards.grant(self._forwards_waiting(), self._rate / leaves)
        if any(self._granted):
            self._dirty[self._seeder] = None

    def _next_note(self) -> Note | None:
        if self._to_seeder:
            return self._to_seeder.popleft()
        copied, forwarded = self._done
        if not (copied or forwarded or any(self._granted)):
            return None
        copies, forwards = self._granted
        self._granted = [0, 0]
        self._done = (copied[MAX_INDICES:], forwarded[MAX_INDICES:])
        return Credit(
            copies=copies,
            forwards=forwards,
            epoch=self._epoch,
            copied=tuple(copied[:MAX_INDICES]),
            forwarded=tuple(forwarded[:MAX_INDICES]),
        )

    def _left_s(self) -> float:
        """Return how long the rest takes at the recent pace of arrivals."""
        return self._missing / self._arrival_rate if self._arrival_rate else math.inf

    def _backlog(self) -> float:
        most = LONGEST_WINDOWS * self._copies.size
        return sum(min(most, len(child.queue)) for child in self._children.values()) / max(1, len(self._children))

    def _usual_backlog(self) -> float:
        """Return the copies waiting per child, without the children whose links lag."""
        most = LONGEST_WINDOWS * self._copies.size
        waiting = [len(c.queue) for c in self._children.values() if len(c.queue) <= most]
        return sum(waiting) / max(1, len(waiting))

    def _forwards_waiting(self) -> float:
        """Return the forwards waiting per leaf that they go to: none goes back to the leaf it came from."""
        most = LONGEST_WINDOWS * self._forwards.size
        return sum(min(most, leaf.forwards) for leaf in self._leaves()) / max(1, self._leaf_children - 1)

    def _leaves(self) -> Iterator[TreeChild]:
        return (child for child in self._children.values() if child.leaf)

    # -- time ------------------------------------------------------------------------------------------------

    def _measure(self, elapsed: float) -> None:
        # During the first second this is the plain average so far, so that the initial 0 does not pull it down.
        self._measured_s = min(RATE_S, self._measured_s + elapsed) if self._fresh_rate or self._fresh else elapsed
        weight = min(1.0, elapsed / self._measured_s)
        for child in self._children.values():
            child.measure(elapsed, weight)
        self._rate = sum(child.rate for child in self._children.values())
        self._fresh_rate += weight * (self._fresh / elapsed - self._fresh_rate)
        self._arrival_rate += weight * (self._new / elapsed - self._arrival_rate)
        self._fresh = self._new = 0
        self._copies.settle(self._rate / max(1, len(self._children)))
        self._forwards.settle(self._rate / max(1, self._leaf_children - 1))

    def _defer_stalled(self, elapsed: float) -> None:
        """Set the chunks of stalled children aside. If many look stalled, it is this node's own uplink: do nothing."""
        live = [child for child in self._children.values() if not child.stalled]
        fair = sum(child.rate for child in live) / max(1, len(live))
        for peer, child in self._children.items():
            if child.stalled:
                child.offer(0.5 * fair * elapsed)
                self._dirty[peer] = None
        slow = [child for child in live if child.is_stalling(fair)]
        if len(slow) <= max(1, len(live) // 3):
            for child in slow:
                self._defer(child)

    def _defer(self, child: TreeChild) -> None:
        child.stalled = True
        child.offered = 1
        child.kept_up = 0
        for index, _, duty in child.drop():
            child.deferred.append(index)
            self._discharge(duty)
        # The send under way may never arrive.
        self._discharge(child.busy)
        child.busy = None

    def _ask(self, now: float) -> None:
        """Ask holders for missing chunks, the seeder last."""
        self._asked = {index: ask for index, ask in self._asked.items() if now - ask[1] < ASK_AGAIN_S}
        for peer, child in self._children.items():
            child.asked = sum(asked == peer for asked, _ in self._asked.values())
        wishes: dict[NodeId, list[int]] = {}
        self._tries += 1
        for index in self._next_missing(MAX_INDICES - len(self._asked)):
            if (asked := self._whom_to_ask(index)) is not None:
                wishes.setdefault(asked, []).append(index)
                self._asked[index] = asked, now
        for peer, indices in wishes.items():
            notes = self._to_seeder if peer == self._seeder else self._children[peer].notes
            notes.append(Want(indices=tuple(indices)))
            self._dirty[peer] = None

    def _whom_to_ask(self, index: int) -> NodeId | None:
        """Pick the holder that sent most in proportion to what it is being asked for. Pick the seeder if nobody holds
        the chunk, and in every eighth round, because what others claim may be wrong."""
        holders = [(c.asked + 1) / (c.arrivals + 1) for c in self._children.values() if c.holds(index)]
        if self._linked and (not holders or self._tries % 8 == 0):
            return self._seeder
        least = min(holders, default=0.0)
        for peer, child in self._children.items():
            if child.holds(index) and (child.asked + 1) / (child.arrivals + 1) <= least:
                child.asked += 1
                return peer
        return None

    def _next_missing(self, room: int) -> list[int]:
        """Return the next few chunks that are missing and not asked for. They go from the last to the first and round
        again, because deferred chunks come in ascending order."""
        found: list[int] = []
        for _ in range(self._count):
            if len(found) >= room:
                break
            self._cursor = (self._cursor - 1) % self._count
            index = self._cursor
            if not has_bit(self._have, index) and index not in self._asked:
                found.append(index)
        return found

    def _tell_all(self, note: Note) -> None:
        for peer, child in self._children.items():
            child.notes.append(note)
            self._dirty[peer] = None
        self._to_seeder.append(note)
        self._dirty[self._seeder] = None
