"""Many pieces from several peers at once over HTTP: several requests in flight, whoever fails or lies is left."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from swarm.broadcast.coding import in_thread
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.http import Busy, Gone, Peer

REQUESTS_A_PEER = 4
"""Under way at once to one peer: with pieces of 1 MiB that covers 300 ms at 100 Mbit/s, half of what a client opens."""

REQUESTS_IN_ALL = 16
"""Pieces in memory at once: 64 MiB at most."""

FETCH_S = 60.0
"""Time limit for one piece: 4 MiB at 0.6 Mbit/s."""

LATE_S = 2.0
LATE_RATIO = 3.0
"""A piece under way for longer than this, and three times as long as they take on average, is asked of another too."""

GONE_IN_A_ROW = 4
"""A peer that lacks so many pieces one after the other has moved on to another version."""

BUSY_IN_A_ROW = 10
"""A peer that asks for patience so often has none to give."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """One GET. `take` gets the body, in a thread, and says whether it is what was signed."""

    path: str
    expected_bytes: int
    cap_bytes: int
    take: Callable[[bytes], bool]


class Download:
    """Pieces that are fetched from one set of peers, and then, if some are left, from another one."""

    def __init__(
        self, pieces: Sequence[Piece], pool: Executor, *, meter: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.blamed: list[Peer] = []
        self.fetched_bytes = 0
        self._pool = pool
        self._meter = meter
        self._waiting = deque(pieces)
        self._asked: dict[Piece, tuple[float, int]] = {}
        self._left = set(pieces)
        self._seconds = 0.0
        self._taken = 0
        self._news = asyncio.Event()

    @property
    def complete(self) -> bool:
        return not self._left

    @property
    def left(self) -> int:
        """Pieces that are still to come."""
        return len(self._left)

    async def run(self, peers: Sequence[Peer]) -> bool:
        """True when every piece is taken; False when no peer is left that gives the rest."""
        if not peers or self.complete:
            return self.complete
        each = min(REQUESTS_A_PEER, max(1, REQUESTS_IN_ALL // len(peers)))
        tasks = [
            asyncio.create_task(self._work(state))
            for state in [_PeerState(peer) for peer in peers[:REQUESTS_IN_ALL]]
            for _ in range(each)
        ]
        try:
            pending = set(tasks)
            while pending and not self.complete:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.complete

    async def _work(self, state: _PeerState) -> None:
        while not state.left and (piece := await self._next(state)) is not None:
            try:
                reason = await self._fetch(state, piece)
            finally:
                self._put_back(piece)
            if reason is not None and not state.left:
                state.left = True
                self.faults[reason] += 1
                self.blamed.append(state.peer)

    async def _next(self, state: _PeerState) -> Piece | None:
        """A piece that nobody was asked for, or one that is late; None when all are taken."""
        loop = asyncio.get_running_loop()
        while self._left and not state.left:
            while self._waiting:
                piece = self._waiting.popleft()
                if piece in self._left:
                    self._asked[piece] = (loop.time(), 1)
                    return piece
            late_s = max(LATE_S, LATE_RATIO * self._seconds / max(1, self._taken))
            for piece, (since, askers) in self._asked.items():
                if askers == 1 and loop.time() - since > late_s:
                    self._asked[piece] = (since, 2)
                    return piece
            self._news.clear()
            try:
                async with asyncio.timeout(LATE_S / 2):
                    await self._news.wait()
            except TimeoutError:
                pass
        return None

    def _put_back(self, piece: Piece) -> None:
        """A piece that did not come waits again, unless another peer is being asked for it."""
        asked = self._asked.pop(piece, None)
        if piece in self._left:
            if asked is not None and asked[1] > 1:
                self._asked[piece] = (asked[0], asked[1] - 1)
            else:
                self._waiting.append(piece)
        self._news.set()

    async def _fetch(self, state: _PeerState, piece: Piece) -> str | None:
        """Ask for a piece and take it; why the peer is to be left, or None."""
        loop = asyncio.get_running_loop()
        if self._meter is not None:
            await self._meter(piece.expected_bytes)
        began = loop.time()
        try:
            body = await state.peer.get(piece.path, cap_bytes=piece.cap_bytes, timeout_s=FETCH_S)
        except Gone:
            state.gone += 1
            return "gone" if state.gone >= GONE_IN_A_ROW else None
        except Busy as busy:
            state.busy += 1
            await asyncio.sleep(busy.retry_after_s)
            return "busy" if state.busy >= BUSY_IN_A_ROW else None
        except ProtocolError:
            return "refused"
        except PeerUnreachable:
            return "unreachable"
        self.fetched_bytes += len(body)
        if piece in self._left and not await in_thread(piece.take, body, pool=self._pool):
            return "lied"
        self._left.discard(piece)
        state.gone = state.busy = 0
        self._seconds += loop.time() - began
        self._taken += 1
        return None


class _PeerState:
    """How one peer does in one download."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.left = False
        self.gone = 0
        self.busy = 0
