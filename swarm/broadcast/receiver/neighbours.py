"""The nodes that the learner's rosters link a receiver with, and those that it can ask for what it lacks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from swarm.broadcast.notes import Roster
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.net.client import HttpPeer, Progress
from swarm.net.hosts import Tries, caller_of
from swarm.net.links import MIN_BACK_OFF_S, Links, Station
from swarm.net.stream import LinkEnd, Stream
from swarm.types import Address, NodeId

LISTED_S = 2.0
"""How long a version waits for the roster that says whether this node is public. Without faults it comes earlier."""

DROPPED_S = 5.0
"""How long links to nodes that left the roster live on. A restarted learner lists such nodes again by then."""

FETCH_S = 60.0  # Time limit for the layout: 32 MiB at 4.5 Mbit/s
SMALL_BYTES = 64 * 1024  # Objects up to this size are asked of the learner first
SILENT_S = 2.0  # A peer that has not answered for this long may never do so: another one is asked too
MIN_BYTES = 16 * 1024  # In SILENT_S, from a peer that is not silent: a quarter of 256 kbit/s, as streams share the line
MAX_WAIT_S = 10.0  # Between two questions to a learner that is not linked: a firewall may let no stream through
T = TypeVar("T")


async def first_of(peers: Sequence[HttpPeer], ask: Callable[[HttpPeer, Progress], Coroutine[Any, Any, T]]) -> T | None:
    """Return the first answer, or None if nobody gives one. After a failure the next peer is asked; once less than
    MIN_BYTES came in SILENT_S, the last one too, which is the learner. `ask` reports what comes."""
    waiting, asked, done = deque(peers), set[asyncio.Task[T]](), set[asyncio.Task[T]]()
    loop = asyncio.get_running_loop()
    moved_at, most = loop.time(), 0

    def moved(size: int) -> None:
        nonlocal moved_at, most
        # More than any peer gave before: several that send slowly and then fail hold this up no longer than one.
        if size >= most + MIN_BYTES:
            moved_at, most = loop.time(), size

    try:
        while waiting or asked:
            is_silent = len(asked) == 1 and loop.time() - moved_at >= SILENT_S
            if waiting and (done or not asked or is_silent):
                peer = waiting.pop() if is_silent and not done else waiting.popleft()
                asked.add(asyncio.create_task(ask(peer, moved)))
                moved_at = loop.time()
            patience_s = moved_at + SILENT_S - loop.time() if waiting and len(asked) == 1 else None
            done, asked = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not isinstance(task.exception(), PeerUnreachable | ProtocolError):
                    return task.result()
        return None
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


class Neighbours:
    """The learner, whom this node always dials, and the members of the newest roster."""

    def __init__(self, station: Station, open_link: Callable[[NodeId, Stream], LinkEnd]) -> None:
        self._station = station
        self._members: dict[NodeId, tuple[Address, ...]] = {}  # Of the newest roster; a leaf has no addresses
        self._listed = asyncio.Event()
        self._parting: asyncio.TimerHandle | None = None
        self._tries = Tries(MIN_BACK_OFF_S, MAX_WAIT_S, lan=station.lan())
        self.links = Links(station, open_link=open_link, admits=lambda node: node in self._members)

    def dial(self) -> None:
        """Keep a link to the learner and to those members that this node has to dial: of two publics the smaller id
        dials, and a leaf dials all publics."""
        me, (learner, _) = self._station.me, self._station.learner()
        wanted: dict[NodeId, Callable[[], list[Address]]] = {learner: lambda: self._station.learner()[1]}
        for node, addresses in self._members.items() if me in self._members else ():
            if node != me and (self.is_leaf(me) or me < node) and (ways := self._ways(addresses)):
                wanted[node] = lambda ways=ways: ways  # type: ignore[misc]
        self.links.dial(wanted)

    def take_roster(self, roster: Roster) -> None:
        """Take the learner's newest word on who takes part."""
        self._members = {member.node: member.addresses for member in roster.members}
        self.dial()
        if self._station.me in self._members:
            self._listed.set()
        else:
            self._listed.clear()
        if self._parting is None:
            self._parting = asyncio.get_running_loop().call_later(DROPPED_S, self._part)

    async def close(self) -> None:
        if self._parting is not None:
            self._parting.cancel()
        await self.links.close()

    def none_is_public(self) -> bool:
        """True if the learner has said who takes part, and this node may call none of them."""
        others = [addresses for node, addresses in self._members.items() if node != self._station.me]
        return bool(self._members) and not any(map(self._ways, others))

    def is_leaf(self, node: NodeId) -> bool:
        return node in self._members and not self._members[node]

    async def is_leaf_itself(self) -> bool:
        """Return True if the learner lists this node as a leaf, or does not list it in time: a leaf promises least."""
        try:
            async with asyncio.timeout(LISTED_S):
                await self._listed.wait()
        except TimeoutError:
            return True
        return self.is_leaf(self._station.me)

    # -- whom to ask -----------------------------------------------------------------------------------------

    def publics(self) -> list[HttpPeer]:
        """Return the linked publics of the roster in random order, or if there are none, those that gossip has proven.
        Where the others are, the learner merely claims."""
        named = ((node, address) for node, ways in self._members.items() for address in self._ways(ways))
        found = list(dict(one for one in named if self._is_at(*one)).items()) or self._station.publics()
        self._station.random.shuffle(found)
        return [self._station.peer_at(node, address) for node, address in found]

    def learner(self) -> list[HttpPeer]:
        """Return the learner where its stream leads; without a stream ever more rarely, and nothing in between."""
        node, addresses = self._station.learner()
        found = [one for one in addresses if self._is_at(node, one)]
        if not found and (found := [one for one in addresses if self._tries.is_due(one, now=time.monotonic())][:1]):
            self._tries.tried(found[0], now=time.monotonic())
        return [self._station.peer_at(node, address) for address in found[:1]]

    async def fetch(self, digest: bytes, cap_bytes: int, read: Callable[[bytes], T], name: str) -> tuple[bytes, T]:
        """Fetch an object from a peer that gives the right one, from the learner last unless it is small or the peer is
        silent. Return it and what `read`, in a thread, makes of it; `read` raises ProtocolError for a wrong one. Raise
        PeerUnreachable if nobody gives it."""
        # At first only the learner has the layout. For a small one, asking around takes more time than it saves.
        learner, publics = self.learner(), self.publics()
        peers = [*learner, *publics] if cap_bytes <= SMALL_BYTES else [*publics, *learner]

        async def ask(peer: HttpPeer, progress: Progress) -> tuple[bytes, T]:
            path = f"/v1/objects/{digest.hex()}"
            data = await peer.get(path, cap_bytes=cap_bytes, timeout_s=FETCH_S, progress=progress)
            return data, await asyncio.to_thread(read, data)

        if (found := await first_of(peers, ask)) is None:
            raise PeerUnreachable(f"nobody gives {name}")
        return found

    # -- parts -----------------------------------------------------------------------------------------------

    def _is_at(self, node: NodeId, address: Address) -> bool:
        """Return True if a stream proves that `node` is at this host."""
        return self._station.linked_at.get(node) == caller_of(address.host)

    def _ways(self, addresses: Iterable[Address]) -> list[Address]:
        """Return which of a member's addresses this node may call and could: a roster may name any."""
        return [one for one in addresses if len(one.fingerprint) in (0, 32) and self._station.dialable(one)]

    def _part(self) -> None:
        self._parting = None
        learner, _ = self._station.learner()
        self.links.end_others({learner, *self._members})
