"""Streams between places in one process, for tests of what runs over them."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from swarm.errors import ProtocolError
from swarm.net.pace import Pace
from swarm.net.server import NodeServer
from swarm.net.stream import Frame, Incoming, Outgoing, Stream, open_stream
from swarm.node.identity import ServerTls
from swarm.types import Address, VersionId

PATIENCE_S = 20.0
"""Longest wait for anything on two busy cores; a test that passes waits for what it asks, not for this."""

MANY_TURNS = 100

CAP_BYTES = 4 * 1024 * 1024


NOTE, CHUNK = 3, 4
VERSION = VersionId(incarnation=2, version=2**40)


def frame_of(payload: bytes, *, type_: int = CHUNK, index: int = 0, sent: Callable[[], None] | None = None) -> Outgoing:
    header = Frame(type_, len(payload), VERSION, kind=1, index=index, via=b"\1" * 8).pack()
    return Outgoing(header, payload, sent)


class Place:
    """A LinkEnd that sends what it is given and keeps what comes."""

    def __init__(self, cap_bytes: int = CAP_BYTES) -> None:
        self.stream: Stream
        self.outbox: deque[Outgoing] = deque()
        self.came: list[tuple[Frame, bytes]] = []
        self.ends: list[Exception | None] = []
        self._cap_bytes = cap_bytes

    def give(self, *frames: Outgoing) -> None:
        self.outbox.extend(frames)
        self.stream.wake()

    def pull(self) -> Outgoing | None:
        return self.outbox.popleft() if self.outbox else None

    def place(self, frame: Frame) -> memoryview:
        if frame.size > self._cap_bytes:
            raise ProtocolError("too large")
        return memoryview(bytearray(frame.size))

    def received(self, frame: Frame, payload: memoryview) -> None:
        self.came.append((frame, bytes(payload)))

    def closed(self, error: Exception | None) -> None:
        self.ends.append(error)


def at(sock: socket.socket, place: Place, *, upload: Pace | None = None, download: Pace | None = None) -> Place:
    """`place` with a stream over `sock`."""
    place.stream = Stream(sock, upload=upload or Pace(None), download=download or Pace(None))
    place.stream.start(place)
    return place


def pair_of_sockets() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair()
    for sock in (here, there):
        sock.setblocking(False)
    return here, there


@asynccontextmanager
async def connected(tls: ServerTls | None) -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one connection to a node's server, the one that dialled first."""
    taken: asyncio.Queue[socket.socket] = asyncio.Queue(maxsize=1)

    async def take(incoming: Incoming) -> None:
        taken.put_nowait(incoming.sock)

    server = NodeServer([], dict, tls=tls.context if tls else None, on_stream=take)
    port = await server.start("127.0.0.1", 0)
    try:
        address = Address(host="127.0.0.1", port=port, fingerprint=tls.fingerprint if tls else b"")
        there = await open_stream(address)
        here = await asyncio.wait_for(taken.get(), PATIENCE_S)
        with there, here:
            yield there, here
    finally:
        await server.stop()


async def until(condition: Callable[[], object], *, pause_s: float = 0.002) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(pause_s)


async def many_turns() -> None:
    """Let the loop run, to see that nothing happens that waits for nothing but its turn: neither time nor a thread."""
    for _ in range(MANY_TURNS):
        await asyncio.sleep(0)
