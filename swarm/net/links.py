"""The long-lived streams of one node: which it dials and accepts, and how both sides prove who they are.

Of two publics the one with the smaller id dials. A leaf dials every public that it should be linked with, and everybody
dials the learner. A new link to the same node replaces the old one, which may be half dead.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Annotated

import msgspec

from swarm.bounded import Bounded
from swarm.errors import PeerUnreachable, ProtocolError
from swarm.net.client import PeerClient
from swarm.net.hosts import Tries, caller_of
from swarm.net.pace import Pace
from swarm.net.sessions import ServerSessions
from swarm.net.stream import (
    HEADER,
    Frame,
    Incoming,
    LinkEnd,
    Stream,
    open_stream,
    receive_exactly,
    send_all,
    unpack_frame,
)
from swarm.types import Address, NodeId, VersionId
from swarm.wire import PROTOCOL, Message, decode, encode

METHOD = "STREAM"
PATH = "/v1/stream"  # A stream's first frame is signed over METHOD and PATH, like an HTTP request
HELLO = 1
WELCOME = 2
HELLO_BYTES = 1024
HELLO_S = 10.0
MIN_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0
BARRED_S = 60.0  # How long a node that sent wrong chunks again and again is avoided
MAX_BARRED = 4096
NO_VERSION = VersionId(incarnation=0, version=0)


class StreamHello(Message, frozen=True):
    """The first frame of the node that dialled. `auth` is as in a signed request's header, over PROTOCOL, so a node of
    another protocol is refused."""

    auth: Annotated[str, msgspec.Meta(max_length=200)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """What a node's network offers to its data plane.

    `learner` gives the learner's id and addresses, `head` the newest signed head that gossip knows (empty for none),
    `publics` the publics that this node can dial, `public_at` the proven addresses of a public (none for a leaf),
    `dialable` whether this node may call an address that another one named, `lan` whether private ones are among them.
    `refused` counts refused streams for `status`. `linked_at` says where each linked node was dialled or dials from.
    """

    me: NodeId
    sessions: ServerSessions
    peer_at: Callable[[NodeId, Address], PeerClient]
    learner: Callable[[], tuple[NodeId, list[Address]]]
    head: Callable[[], bytes]
    publics: Callable[[], list[tuple[NodeId, Address]]]
    public_at: Callable[[NodeId], list[Address]]
    dialable: Callable[[Address], bool]
    lan: Callable[[], bool]
    upload: Pace
    download: Pace
    random: Random
    refused: Counter[str] = field(default_factory=Counter)
    linked_at: dict[NodeId, str] = field(default_factory=dict)


class Links:
    """All streams of this node. `open_link(node, stream)` gives the LinkEnd that a new stream serves. `admits` says
    which nodes may open one."""

    def __init__(
        self,
        station: Station,
        *,
        open_link: Callable[[NodeId, Stream], LinkEnd],
        admits: Callable[[NodeId], bool],
    ) -> None:
        self._station = station
        self._open_link = open_link
        self._admits = admits
        self._streams: dict[NodeId, Stream] = {}
        self._wanted: dict[NodeId, Callable[[], list[Address]]] = {}
        self._dialling: dict[NodeId, asyncio.Task[None]] = {}
        self._closed = False
        self._barred_until: Bounded[NodeId, float] = Bounded(MAX_BARRED)
        self._tries = Tries(MIN_BACK_OFF_S, MAX_BACK_OFF_S, lan=station.lan())

    def __len__(self) -> int:
        return len(self._streams)

    def dial(self, wanted: dict[NodeId, Callable[[], list[Address]]]) -> None:
        """Keep a link to each of these nodes, trying its addresses in turn. Give up all others that it dialled. A host
        of the open internet that does not answer is tried ever more rarely, however many of the nodes name it."""
        self._wanted = wanted
        for node in [n for n in self._dialling if n not in wanted]:
            self._dialling.pop(node).cancel()
        for node in wanted:
            if node not in self._dialling:
                self._dialling[node] = asyncio.get_running_loop().create_task(self._keep(node))

    def bar(self, node: NodeId) -> None:
        """End the link to `node`, and refuse it new ones for a while."""
        self._barred_until[node] = asyncio.get_running_loop().time() + BARRED_S
        self.end(node)

    def end(self, node: NodeId) -> None:
        if (stream := self._streams.get(node)) is not None:
            stream.close()

    def end_others(self, wanted: Collection[NodeId]) -> None:
        """End the links to all other nodes."""
        for node in [n for n in self._streams if n not in wanted]:
            self.end(node)

    async def close(self) -> None:
        """End all links. A link whose hello is still being read ends as soon as it begins."""
        self._closed = True
        tasks = list(self._dialling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams.values()):
            stream.close()

    # -- accepting -------------------------------------------------------------------------------------------

    async def accept(self, incoming: Incoming) -> None:
        """Take a stream if its sender proves that it is a node with which this one wants a link."""
        try:
            async with asyncio.timeout(HELLO_S):
                node = await self._read_hello(incoming)
                await send_all(incoming.sock, Frame(WELCOME, 0, NO_VERSION).pack())
        except BaseException as error:
            incoming.sock.close()
            incoming.leave()
            if not isinstance(error, (OSError, TimeoutError, ProtocolError)):
                raise
            self._station.refused["stream"] += 1
        else:
            self._begin(node, incoming.sock, incoming.leave)
            if self._closed:
                self.end(node)

    async def _read_hello(self, incoming: Incoming) -> NodeId:
        frame = unpack_frame(await receive_exactly(incoming.sock, HEADER.size))
        if frame.type != HELLO or frame.size > HELLO_BYTES:
            raise ProtocolError("a stream begins with a hello")
        hello = decode(await receive_exactly(incoming.sock, frame.size), StreamHello, cap_bytes=HELLO_BYTES)
        node = self._station.sessions.check(hello.auth, METHOD, PATH, encode(PROTOCOL), now=time.monotonic())
        incoming.prove(node)
        if self._is_barred(node) or not self._admits(node):
            raise ProtocolError("this node does not want a link with that one")
        return node

    # -- dialling --------------------------------------------------------------------------------------------

    async def _keep(self, node: NodeId) -> None:
        """Link to `node` again and again, at the addresses known by then."""
        loop = asyncio.get_running_loop()
        # The learner's wait is its own: another node at its host may be gone.
        is_learner = node == self._station.learner()[0]
        tries = Tries(MIN_BACK_OFF_S, MAX_BACK_OFF_S, lan=self._station.lan()) if is_learner else self._tries
        tried = 0
        while True:
            due = [a for a in self._wanted[node]() if tries.is_due(a, now=loop.time())]
            if due and not self._is_barred(node):
                address, tried = due[tried % len(due)], tried + 1
                tries.tried(address, now=loop.time())
                with suppress(PeerUnreachable, ProtocolError):
                    ended = await self._dial(node, address)
                    tries.answered(address)
                    self._station.linked_at[node] = caller_of(address.host)  # It may be a name
                    tried -= 1
                    await ended.wait()
            await asyncio.sleep(MIN_BACK_OFF_S * self._station.random.uniform(0.5, 1.0))

    async def _dial(self, node: NodeId, address: Address) -> asyncio.Event:
        """Try once. The returned event is set when the link has ended."""
        peer = self._station.peer_at(node, address)
        auth = await peer.signed_header(METHOD, PATH, encode(PROTOCOL))
        sock = await open_stream(address)
        try:
            async with asyncio.timeout(HELLO_S):
                hello = encode(StreamHello(auth=auth))
                await send_all(sock, Frame(HELLO, len(hello), NO_VERSION).pack() + hello)
                if unpack_frame(await receive_exactly(sock, HEADER.size)).type != WELCOME:
                    raise ProtocolError(f"{address.authority} did not welcome a stream")
        except BaseException as error:
            sock.close()
            if not isinstance(error, (OSError, TimeoutError)):
                raise
            # The peer may have been restarted and no longer know our session.
            await peer.renew_session()
            raise PeerUnreachable(f"{address.authority} does not take a stream ({error})") from error
        ended = asyncio.Event()
        self._begin(node, sock, ended.set)
        return ended

    # -- both ------------------------------------------------------------------------------------------------

    def _begin(self, node: NodeId, sock: socket.socket, on_end: Callable[[], None]) -> None:
        self.end(node)
        self._station.linked_at[node] = ""
        with suppress(OSError):  # It has gone already
            self._station.linked_at[node] = caller_of(sock.getpeername()[0])
        stream = self._streams[node] = Stream(sock, upload=self._station.upload, download=self._station.download)

        def ended() -> None:
            if self._streams.get(node) is stream:
                del self._streams[node], self._station.linked_at[node]
            on_end()

        stream.start(self._open_link(node, stream), ended)

    def _is_barred(self, node: NodeId) -> bool:
        return self._barred_until.get(node, 0.0) > asyncio.get_running_loop().time()
