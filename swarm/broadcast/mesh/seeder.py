"""The learner's part in a mesh of depth two: it deals every chunk to one forwarder, by credit.

Theory of operation. Forwarders grant credit (forwarder.py). A chunk goes to the forwarder that has credit and the
shortest queue of fresh chunks on its link. Leaves come first, because a chunk that a leaf forwards costs the publics
the least, and all chunks must pass through these. If nobody has credit although the uplink is idle, the seeder sends a
chunk to everybody itself. Near the end it passes over a forwarder that would finish late. It deals again what it dealt
to a forwarder that dies or stands still.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

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
)
from swarm.types import NodeId

TICK_S = 0.1
UNSENT = 2  # Fresh chunks that wait on one link: the one being sent, and the next
OWN_QUEUE = 0.15  # The seeder sends a chunk itself only while its own copies queued per link are fewer
LATENCY_WEIGHT = 0.3
SPARE_S = 0.15
"""Near the end a forwarder is passed over if its chunks would take this much longer than the rest of the transfer."""

STILL_S = 0.5  # A link with something to send that asks for nothing for this long counts as standing still
OVERDUE_S = 1.2
OVERDUE_LATENCIES = 3.0
LAST_S = 0.5
IDLE_S = 1.0
"""A forwarder stands still if it has reported nothing for IDLE_S and has held a chunk for longer than OVERDUE_S and
three times its usual time. With 0.6 s healthy forwarders were suspected, and a version took 1.9 times the bound. Once
everything is dealt, it is enough to hold a chunk for longer than LAST_S and three times the median's usual time."""

BARRED_S = 1.0  # How long a forwarder that stood still is dealt nothing
MAX_CREDIT = 1024  # Most credit that a forwarder can have: 0.6 s of 1.6 GB/s in chunks of 1 MiB
RATE_DEALS = 256  # Deals over which the rate of dealing is measured


@dataclass(slots=True, eq=False)
class _Peer:
    leaf: bool
    heard_at: float
    asked_at: float
    credit: int = 0
    forwards: int = 0
    epoch: int = 0
    fresh: deque[Send] = field(default_factory=deque)
    copies: deque[int] = field(default_factory=deque)
    wanted: deque[int] = field(default_factory=deque)
    notes: deque[Note] = field(default_factory=deque)
    to_copy: dict[int, float] = field(default_factory=dict)
    to_forward: dict[int, float] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    latency: float | None = None
    service: float | None = None
    barred_until: float = 0.0
    complete: bool = False
    all_dealt: bool = False
    has: bytes = b""

    def holds(self, index: int) -> bool:
        return self.complete or has_bit(self.has, index)

    def expected(self) -> float:
        """Return how long one more chunk would take, going by those before, or 0 if there were none."""
        return (self.service or 0.0) * (len(self.to_copy) + 1)

    def oldest(self) -> float | None:
        """Return when the oldest chunk was dealt that it has not passed on yet."""
        return min((*self.to_copy.values(), *self.to_forward.values()), default=None)


class Seeder:
    """A Courier for the learner. After a restart (`resumed`) it does not deal again what peers already hold. It deals
    nothing before the core of the segment `after` which it comes has dealt everything: both would count on the same
    idle links, and send to all themselves."""

    def __init__(self, count: int, *, now: float, resumed: bool = False, after: Seeder | None = None) -> None:
        self.complete = True
        self._after = after
        self._before: Seeder | None = None
        if after is not None:
            after._before = self
        self._resumed = resumed
        self._peers: dict[NodeId, _Peer] = {}
        self._count = count
        self._undealt: deque[int] = deque(range(count))
        self._held = bytes((count + 7) // 8)
        self._again: deque[int] = deque()
        self._waiting_for: dict[int, int] = {}
        self._dealt_at: deque[float] = deque(maxlen=RATE_DEALS)
        self._ticked_at = now
        self._dirty: dict[NodeId, None] = {}
        self._relayed: list[int] = []
        self.repairs = 0

    @property
    def dealt(self) -> bool:
        """True if every chunk was dealt, and every forwarder has passed on its chunks."""
        return not (self._undealt or self._again or self._waiting_for)

    def held_by(self, peer: NodeId) -> int:
        """Return about how many chunks a peer holds: what forwarders passed on, or what it said it holds."""
        if (at := self._peers.get(peer)) is None:
            return 0
        settled = self._count - len(self._undealt) - len(self._again) - len(self._waiting_for) - len(at.copies)
        return self._count if at.complete else max(0, settled, int.from_bytes(at.has).bit_count())

    # -- links -----------------------------------------------------------------------------------------------

    def join(self, peer: NodeId, *, leaf: bool, now: float) -> None:
        at = self._peers[peer] = _Peer(leaf, now, now)
        at.copies.extend(self._relayed)
        self._dirty[peer] = None
        self._deal(now)

    def leave(self, peer: NodeId, *, now: float) -> None:
        gone = self._peers.pop(peer, None)
        self._dirty.pop(peer, None)
        if gone is None:
            return
        for send in gone.fresh:
            if send.via is not None:
                self._forgive(send)
        self._take_back(gone)
        self._deal(now)

    # -- what comes ------------------------------------------------------------------------------------------

    def arrived(self, peer: NodeId, index: int, kind: NoteKind, via: NodeId | None, *, now: float) -> None:
        """Do nothing: nobody has anything to send to the seeder."""

    def heard(self, peer: NodeId, note: Note, *, now: float) -> None:
        if (at := self._peers.get(peer)) is None:
            return
        match note:
            case Credit():
                self._note_done(at, note, now)
                if note.epoch == at.epoch:
                    at.credit = min(MAX_CREDIT, at.credit + note.copies)
                    at.forwards = min(MAX_CREDIT, at.forwards + note.forwards)
            case Have(bitmap=bitmap):
                at.has = bitmap[: len(self._held)]
                self._skip(at.has)
            case Complete():
                at.complete = True
                at.copies.clear()
                at.wanted.clear()
                self._skip(b"\xff" * len(self._held))
            case Want(indices=indices):
                new = [i for i in indices if i not in at.wanted][: MAX_INDICES - len(at.wanted)]
                at.wanted.extend(new)
                self.repairs += len(new)
                self._dirty[peer] = None
            case _:
                pass
        self._deal(now)

    # -- what goes -------------------------------------------------------------------------------------------

    def next_for(self, peer: NodeId, *, now: float) -> Note | Send | None:
        if (at := self._peers.get(peer)) is None:
            return None
        at.asked_at = now
        if at.notes:
            return at.notes.popleft()
        if at.fresh:
            return at.fresh.popleft()
        while at.copies:
            if not at.holds(index := at.copies.popleft()):
                return Send(index, NoteKind.COPY)
        if at.wanted:
            return Send(at.wanted.popleft(), NoteKind.COPY)
        if self.dealt and not at.all_dealt:
            at.all_dealt = True
            return AllDealt()
        return None

    def sent(self, peer: NodeId, send: Send, *, now: float) -> None:
        self._deal(now)

    def ready(self) -> list[NodeId]:
        peers = list(self._dirty)
        self._dirty.clear()
        return peers

    def deadline(self) -> float | None:
        return self._ticked_at + TICK_S

    def tick(self, *, now: float) -> None:
        self._ticked_at = now
        for peer, at in self._peers.items():
            self._recall_if_overdue(peer, at, now)
        self._deal(now)
        if self.dealt:
            self._dirty.update((peer, None) for peer, at in self._peers.items() if not at.all_dealt)

    # -- dealing ---------------------------------------------------------------------------------------------

    def _deal(self, now: float) -> None:
        if self._after is not None and self._after._is_dealing():
            return
        while (self._again or self._undealt) and self._peers and self._deal_one(now):
            pass
        if self._before is not None and not self._is_dealing():
            self._before._deal(now)

    def _is_dealing(self) -> bool:
        return bool(self._peers and (self._undealt or self._again))

    def _is_sending(self) -> bool:
        return any(at.fresh or at.copies for at in self._peers.values())

    def _deal_one(self, now: float) -> bool:
        able = [p for p, at in self._peers.items() if at.credit > 0 and self._may_relay(at) and now >= at.barred_until]
        if not able:
            return self._relay_itself(now)
        late = self._late(now)
        # A leaf whose link is full must not keep the publics waiting, nor one public another.
        able = [p for p in able if p not in late and len(self._peers[p].fresh) < UNSENT]
        leaves = [p for p in able if self._peers[p].leaf]
        if self._again:
            # A leaf may have no link to its forwarder; then the chunk would be dealt to leaves for ever.
            publics = [p for p in able if not self._peers[p].leaf]
            return self._give(publics, None, now) if publics else self._relay_itself(now)
        if leaves:
            return self._deal_to_leaf(leaves, late, now)
        # If all that have credit are late, the others are sending their last chunks. Waiting for them is fastest.
        return bool(able) and self._give(able, None, now)

    def _deal_to_leaf(self, able: list[NodeId], late: set[NodeId], now: float) -> bool:
        others = [p for p, at in self._peers.items() if at.leaf]
        if len(others) == 1:
            return self._give(able, None, now)
        forwarders = [p for p, at in self._peers.items() if not at.leaf and at.forwards > 0 and p not in late]
        if forwarders:
            return self._give(able, min(forwarders, key=lambda p: _load(self._peers[p])), now)
        if not self._own_links_idle(now):
            return False
        chosen = self._shortest(able)
        for peer in others:
            if peer != chosen:
                self._peers[peer].copies.append(self._peek())
                self._dirty[peer] = None
        return self._give([chosen], None, now)

    def _give(self, able: list[NodeId], via: NodeId | None, now: float) -> bool:
        peer = self._shortest(able)
        at = self._peers[peer]
        index = self._pop()
        at.credit -= 1
        if not at.to_copy and not at.to_forward:
            at.heard_at = now
        at.to_copy[index] = now
        at.ahead[index] = len(at.to_copy)
        self._waiting_for[index] = 1
        if via is not None:
            forwarder = self._peers[via]
            forwarder.forwards -= 1
            if not forwarder.to_copy and not forwarder.to_forward:
                forwarder.heard_at = now
            forwarder.to_forward[index] = now
            self._waiting_for[index] = 2
        at.fresh.append(Send(index, NoteKind.FRESH, via))
        self._dealt_at.append(now)
        self._dirty[peer] = None
        return True

    def _relay_itself(self, now: float) -> bool:
        if not self._own_links_idle(now):
            return False
        index = self._pop()
        self._relayed.append(index)
        for peer, at in self._peers.items():
            at.copies.append(index)
            self._dirty[peer] = None
        return True

    def _may_relay(self, at: _Peer) -> bool:
        return not at.leaf or any(not other.leaf for other in self._peers.values())

    def _own_links_idle(self, now: float) -> bool:
        """Return True if the uplink has room. A link that stands still, asking for nothing lately, does not count."""
        if self._after is not None and self._after._is_sending():
            return False
        peers = [at for at in self._peers.values() if now - at.asked_at < STILL_S or not (at.fresh or at.copies)]
        return not any(at.fresh for at in peers) and sum(len(at.copies) for at in peers) < OWN_QUEUE * len(peers)

    def _late(self, now: float) -> set[NodeId]:
        """Return the forwarders whose chunks will take longer than the rest of the transfer."""
        expected = {p: at.expected() for p, at in self._peers.items() if at.service is not None}
        if not expected or len(self._dealt_at) < 2 or now <= self._dealt_at[0]:
            return set()
        rate = len(self._dealt_at) / (now - self._dealt_at[0])
        limit = (len(self._undealt) + len(self._again)) / rate + min(expected.values()) + SPARE_S
        return {p for p, takes in expected.items() if takes > limit}

    def _shortest(self, able: list[NodeId]) -> NodeId:
        """Return the peer with the shortest queue; among equals the quickest so far. Where publics that forward for
        leaves are the bottleneck, all others have credit to spare, and a slow one would keep its forwarder waiting."""
        return min(able, key=lambda p: (len(self._peers[p].fresh), self._peers[p].expected()))

    def _peek(self) -> int:
        return self._again[0] if self._again else self._undealt[0]

    def _pop(self) -> int:
        if self._again:
            return self._again.popleft()
        index = self._undealt.popleft()
        self._pass_over_held()
        return index

    # -- what was dealt --------------------------------------------------------------------------------------

    def _note_done(self, at: _Peer, note: Credit, now: float) -> None:
        for index in note.copied:
            if (dealt_at := at.to_copy.pop(index, None)) is not None:
                before = at.latency if at.latency is not None else now - dealt_at
                at.latency = before + LATENCY_WEIGHT * (now - dealt_at - before)
                took = (now - dealt_at) / at.ahead.pop(index)
                before = at.service if at.service is not None else took
                at.service = before + LATENCY_WEIGHT * (took - before)
                at.heard_at = now
                self._settle(index)
        for index in note.forwarded:
            if at.to_forward.pop(index, None) is not None:
                at.heard_at = now
                self._settle(index)
        if self.dealt:
            self._dirty.update(dict.fromkeys(self._peers))

    def _settle(self, index: int) -> None:
        left = self._waiting_for.get(index, 0) - 1
        if left > 0:
            self._waiting_for[index] = left
        else:
            self._waiting_for.pop(index, None)

    def _recall_if_overdue(self, peer: NodeId, at: _Peer, now: float) -> None:
        oldest = at.oldest()
        if oldest is None or not (self._stands_still(at, oldest, now) or self._is_waited_for(oldest, now)):
            return
        for send in at.fresh:
            if send.via is not None:
                self._forgive(send)
        at.fresh.clear()
        at.epoch += 1
        recalled = [*at.to_copy, *at.to_forward]
        at.notes.extend(
            Recall(indices=tuple(recalled[i : i + MAX_INDICES]), epoch=at.epoch)
            for i in range(0, len(recalled), MAX_INDICES)
        )
        at.barred_until = now + BARRED_S
        self._take_back(at)
        self._dirty[peer] = None

    @staticmethod
    def _stands_still(at: _Peer, oldest: float, now: float) -> bool:
        limit = max(OVERDUE_S, OVERDUE_LATENCIES * (at.latency or 0.0))
        return now - oldest > limit and now - at.heard_at > IDLE_S

    def _is_waited_for(self, oldest: float, now: float) -> bool:
        """Return True if nothing is left to deal, and a forwarder has held a chunk for much longer than usual."""
        if self._undealt or self._again:
            return False
        known = [at.latency for at in self._peers.values() if at.latency is not None]
        return now - oldest > max(LAST_S, OVERDUE_LATENCIES * median(known)) if known else False

    def _take_back(self, at: _Peer) -> None:
        """Deal again what `at` was dealt, and expect nothing more from it. It still gets the copies it waits for."""
        taken = {*at.to_copy, *at.to_forward}
        at.to_copy.clear()
        at.ahead.clear()
        at.to_forward.clear()
        at.credit = at.forwards = 0
        at.fresh.clear()
        for other in self._peers.values():
            for index in taken:
                other.to_copy.pop(index, None)
                other.ahead.pop(index, None)
                other.to_forward.pop(index, None)
        self.repairs += len(taken)
        for index in taken:
            self._waiting_for.pop(index, None)
            self._again.append(index)

    def _forgive(self, send: Send) -> None:
        """Let a forwarder take another chunk, because the leaf will not send it this one."""
        forwarder = self._peers.get(send.via) if send.via is not None else None
        if forwarder is not None and forwarder.to_forward.pop(send.index, None) is not None:
            forwarder.forwards += 1

    def _skip(self, bitmap: bytes) -> None:
        """After a restart of the seeder, do not deal chunks that somebody holds: the others will ask for them."""
        if self._resumed:
            held = int.from_bytes(self._held, "little") | int.from_bytes(bitmap, "little")
            self._held = held.to_bytes(len(self._held), "little")
            self._pass_over_held()

    def _pass_over_held(self) -> None:
        """Keep a chunk that has to be dealt at the head: whether anything is left is asked for every note."""
        while self._undealt and has_bit(self._held, self._undealt[0]):
            self._undealt.popleft()


def _load(at: _Peer) -> float:
    return len(at.to_forward) / (len(at.to_forward) + at.forwards)
