"""A receiver's part in a mesh of depth two: relay what the seeder deals to it, keep the rest, ask for what is missing.

Theory of operation (Mutualcast; the rules were found by measurement, docs/broadcast.md). Every chunk is dealt to one
relay, which sends it to all its links. How many chunks a relay is dealt follows from credit: it grants one whenever the
copies that wait in its queues, per child, and the chunks on their way to it are fewer than its window. The gate is on
the sum of the queues, so that one slow child does not slow the others. A leaf has links to publics alone: it sends its
chunks to these, and one of them, named by the seeder, forwards them to the other leaves; forward credit works alike.

Nothing that a peer says is believed further than this transfer: a lie costs time, never bytes (I2 is the shell's).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from swarm.broadcast.child import Child, Duty
from swarm.broadcast.notes import (
    MAX_INDICES,
    AllDealt,
    Complete,
    Credit,
    Have,
    Kind,
    Note,
    Recall,
    Send,
    Want,
    has_bit,
)
from swarm.broadcast.window import Window
from swarm.types import NodeId

TICK_S = 0.1
"""How often rates are measured and missing chunks are looked for."""

RATE_S = 1.0
"""Rates are of the last second or so."""

DEFERRED_EVERY = 2
"""So many chunks to a child, one is of those that it missed: where the queue is never empty they would wait for the
end, and everybody with them."""

LONGEST_WINDOWS = 2
"""A queue counts for so many windows at most. Else one link that TCP has slowed down after a loss would take all the
room there is, and the relay would keep to its pace with all other links idle."""

QUIET_S = 2.0
"""Without a chunk for so long, a receiver asks for what it lacks even if the seeder is silent: it may be dead."""

ASK_AGAIN_S = 1.0
"""A chunk that was asked for and did not come is asked for elsewhere: longer than a round trip and a queue."""


class Relay:
    """A Courier for one receiver. `have` is what a former life left, `leaf` whether this node dials out only."""

    def __init__(self, seeder: NodeId, count: int, *, leaf: bool, now: float, have: bytes = b"") -> None:
        self._seeder = seeder
        self._count = count
        self._leaf = leaf
        self._have = bytearray(have.ljust(-(-count // 8), b"\0"))
        self._missing = count - sum(has_bit(have, i) for i in range(count))
        self._children: dict[NodeId, Child] = {}
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
        self._asked: dict[int, float] = {}
        self._asked_of: dict[int, NodeId] = {}
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
            # The other end counts anew.
            self._epoch = 0
            self._copies.out = self._forwards.out = 0
            self._granted = [0, 0]
            self._to_seeder = deque(news)
        else:
            child = self._children[peer] = Child(leaf)
            self._leaf_children += leaf
            child.notes.extend(news)
            # It came too late for these, and nobody else was told to send them to it.
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
        for index in [i for i, asked in self._asked_of.items() if asked == peer]:
            del self._asked[index], self._asked_of[index]
        self._grant()

    # -- what comes ------------------------------------------------------------------------------------------

    def arrived(self, peer: NodeId, index: int, kind: Kind, via: NodeId | None, *, now: float) -> None:
        self._arrived_at = now
        self._keep(peer, index)
        if kind is Kind.FRESH and peer == self._seeder:
            self._fresh += 1
            self._copies.arrived(self._usual_backlog())
            self._relay(index, via)
        elif kind is Kind.FORWARD and (source := self._children.get(peer)) is not None and source.leaf:
            leaves = [c for c in self._leaves() if c is not source]
            self._forwards.arrived(self._forwards_waiting(), self._usual_backlog())
            # Once: a leaf that sends it again must not have all leaves sent it again.
            self._queue(index, [] if index in self._forwarded else [(c, Kind.COPY) for c in leaves], forward=True)
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
            if child.holds(index) and kind is not Kind.FORWARD:
                self._discharge(duty)
                continue
            child.busy = duty
            return Send(index, kind)
        if child.wanted:
            return Send(child.wanted.popleft(), Kind.COPY)
        return self._next_deferred(child)

    def _next_deferred(self, child: Child) -> Send | None:
        """What a child missed while it was stalled: as much as it is offered, or if nobody else waits."""
        while child.deferred and (not child.stalled or child.offered > 0 or not self._queued_copies):
            index = child.deferred.popleft()
            if not child.holds(index):
                child.offered -= 1
                return Send(index, Kind.COPY)
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
        self._asked_of.pop(index, None)
        if has_bit(self._have, index):
            return
        self._have[index >> 3] |= 1 << (index & 7)
        self._missing -= 1
        self._new += 1
        if self._missing == 0:
            self.complete = True
            self._tell_all(Complete())

    def _relay(self, index: int, via: NodeId | None) -> None:
        self._relayed.append(index)
        copies = [(c, Kind.FORWARD if self._leaf and peer == via else Kind.COPY) for peer, c in self._children.items()]
        self._queue(index, copies, forward=False)

    def _queue(self, index: int, copies: list[tuple[Child, Kind]], *, forward: bool) -> None:
        duty: Duty = [index, 0, int(forward)]
        for child, kind in copies:
            if child.holds(index) and kind is Kind.COPY:
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
        """One send of `duty` is done, or will never be."""
        if duty is None:
            return
        self._queued_copies -= 1
        duty[1] -= 1
        if duty[1] == 0:
            self._report(duty)

    def _report(self, duty: Duty) -> None:
        self._done[duty[2]].append(duty[0])
        self._dirty[self._seeder] = None

    def _unqueue(self, child: Child) -> None:
        for _, _, duty in child.drop():
            self._discharge(duty)
        child.deferred.clear()
        child.wanted.clear()

    def _promise(self, child: Child, indices: tuple[int, ...]) -> None:
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
        """Tell the seeder of room. Without children a chunk that arrives is done, so only the way here counts."""
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
        """How long it takes until nothing is missing, as chunks came in the last second or so."""
        return self._missing / self._arrival_rate if self._arrival_rate else math.inf

    def _backlog(self) -> float:
        """Copies waiting per child."""
        most = LONGEST_WINDOWS * self._copies.size
        return sum(min(most, len(child.queue)) for child in self._children.values()) / max(1, len(self._children))

    def _usual_backlog(self) -> float:
        """Copies waiting per child whose link does not lag: those that do feed no other."""
        most = LONGEST_WINDOWS * self._copies.size
        waiting = [len(c.queue) for c in self._children.values() if len(c.queue) <= most]
        return sum(waiting) / max(1, len(waiting))

    def _forwards_waiting(self) -> float:
        """Forwards waiting per leaf; none goes to where it came from."""
        most = LONGEST_WINDOWS * self._forwards.size
        return sum(min(most, leaf.forwards) for leaf in self._leaves()) / max(1, self._leaf_children - 1)

    def _leaves(self) -> Iterator[Child]:
        return (child for child in self._children.values() if child.leaf)

    # -- time ------------------------------------------------------------------------------------------------

    def _measure(self, elapsed: float) -> None:
        # In the first second what is measured is the average so far: nothing pulls it down to zero.
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
        """Move the chunks of stalled children aside. If many look stalled, it is this node's own uplink: then none."""
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

    def _defer(self, child: Child) -> None:
        child.stalled = True
        child.offered = 1
        child.kept_up = 0
        for index, _, duty in child.drop():
            child.deferred.append(index)
            self._discharge(duty)
        # What is on its way may never get there.
        self._discharge(child.busy)
        child.busy = None

    def _ask(self, now: float) -> None:
        """Want missing chunks of whoever has them, the seeder last."""
        self._asked = {i: at for i, at in self._asked.items() if now - at < ASK_AGAIN_S}
        self._asked_of = {i: peer for i, peer in self._asked_of.items() if i in self._asked}
        for peer, child in self._children.items():
            child.asked = sum(asked == peer for asked in self._asked_of.values())
        wishes: dict[NodeId, list[int]] = {}
        self._tries += 1
        for index in self._next_missing(MAX_INDICES - len(self._asked)):
            if (asked := self._whom_to_ask(index)) is not None:
                wishes.setdefault(asked, []).append(index)
                self._asked[index], self._asked_of[index] = now, asked
        for peer, indices in wishes.items():
            notes = self._to_seeder if peer == self._seeder else self._children[peer].notes
            notes.append(Want(indices=tuple(indices)))
            self._dirty[peer] = None

    def _whom_to_ask(self, index: int) -> NodeId | None:
        """Of those who have it, who sent the most so far for what it is asked now; the seeder if nobody has it, and
        now and then, because what others say may be wrong."""
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
        """The next few that are missing and not asked for, going round, the last first: what others deferred comes
        the first first."""
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
