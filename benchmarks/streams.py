"""What moving chunks between two nodes costs: WebSockets, event-loop transports, and net/stream.py.

bin/python -m benchmarks.streams --json
bin/python -m benchmarks.streams --size-mib 64 --repeat 1

Two processes on loopback, both on uvloop, messages of 16 KiB, each received into its place in one buffer; with and
without TLS 1.3. No way may have more than TCP_NOTSENT_LOWAT unsent in the kernel.

websocket  aiohttp, client to server, no compression, masked by the client as RFC 6455 wants it
transport  uvloop's transports with a BufferedProtocol that receives in place; frames of swarm.net.stream
stream     swarm.net.stream.Stream; frames of swarm.net.stream

send_cpu_s_per_gb, receive_cpu_s_per_gb  user and system CPU of each process over 1e9 bytes: medians of --repeat
waiting_bytes                            behind a receiver that reads nothing: bytes of frames that the sender has given
                                         away and the kernels of both sides do not hold. They wait in user space
                                         and cannot be decided otherwise any more
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import fcntl
import hashlib
import json
import multiprocessing
import re
import socket
import ssl
import statistics
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import aiohttp
import uvloop
from aiohttp import web

from swarm.net.stream import (
    HEADER,
    PREAMBLE,
    Frame,
    Outgoing,
    Pace,
    Stream,
    open_stream,
    receive_exactly,
    start_tls,
    tune,
)
from swarm.net.stream import unpack_frame as unpack
from swarm.node.identity import ServerTls, load_or_create_tls
from swarm.types import Address, VersionId

WAYS = ("websocket", "transport", "stream")

MESSAGE_BYTES = 16 * 1024
PLACES = 1024
"""Messages that the sender's and the receiver's buffers hold: larger than any cache."""

VERSION = VersionId(incarnation=0, version=1)
CHUNK_TYPE = 4
MASKED_HEADER_BYTES = 8
"""Of a message of 16 KiB in a WebSocket: 2 of the frame, 2 of its length, 4 of the mask."""

RECEIVE_BUFFER_BYTES = 64 * 1024
"""Of the receiver that reads nothing: it is full at once."""

SETTLED_S = 0.5
"""A sender that could send nothing for so long waits for its receiver."""

WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

Figures = dict[str, float]


class Source:
    """Frames to send, each from another place of a large buffer."""

    def __init__(self, count: int) -> None:
        self._content = memoryview(bytes(MESSAGE_BYTES * PLACES))
        self.count = count
        self.given = 0

    @property
    def spent(self) -> bool:
        return self.given == self.count

    def header(self) -> bytes:
        return Frame(CHUNK_TYPE, MESSAGE_BYTES, VERSION, index=self.given).pack()

    def payload(self) -> memoryview:
        at = self.given % PLACES * MESSAGE_BYTES
        self.given += 1
        return self._content[at : at + MESSAGE_BYTES]


class Sink:
    """Where messages are received, and the CPU time since the first byte."""

    def __init__(self, count: int) -> None:
        self._content = memoryview(bytearray(MESSAGE_BYTES * PLACES))
        self._left = count
        self._at = 0
        self.done = asyncio.Event()
        self.began_cpu_s = time.process_time()

    def place(self) -> memoryview:
        at = self._at % PLACES * MESSAGE_BYTES
        self._at += 1
        return self._content[at : at + MESSAGE_BYTES]

    def took(self) -> None:
        self._left -= 1
        if not self._left:
            self.done.set()


class SendingEnd:
    """A LinkEnd that sends."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def pull(self) -> Outgoing | None:
        if self._source.spent:
            return None
        return Outgoing(self._source.header(), self._source.payload(), lambda: None)

    def place(self, frame: Frame) -> memoryview:
        raise AssertionError("nobody sends anything to the sender")

    def received(self, frame: Frame, payload: memoryview) -> None: ...

    def closed(self, error: Exception | None) -> None: ...


class ReceivingEnd:
    """A LinkEnd that receives."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def pull(self) -> Outgoing | None:
        return None

    def place(self, frame: Frame) -> memoryview:
        return self._sink.place()

    def received(self, frame: Frame, payload: memoryview) -> None:
        self._sink.took()

    def closed(self, error: Exception | None) -> None: ...


class SendingProtocol(asyncio.Protocol):
    """Writes frames to a transport until it says pause."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._paused = False

    def connection_made(self, transport: Any) -> None:
        # uvloop's transports are none of asyncio's classes.
        tune(transport.get_extra_info("socket"))
        self._transport: asyncio.Transport = transport
        self.resume_writing()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        if not (self._paused or self._source.spent):
            header = self._source.header()
            self._transport.writelines([header, self._source.payload()])
            asyncio.get_running_loop().call_soon(self._write)


class ReceivingProtocol(asyncio.BufferedProtocol):
    """Receives each frame into its place."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._header = memoryview(bytearray(HEADER.size))
        self._into = self._header
        self._filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < len(self._into):
            return
        self._filled = 0
        if self._into is self._header:
            assert unpack(self._header.tobytes()).size == MESSAGE_BYTES
            self._into = self._sink.place()
        else:
            self._into = self._header
            self._sink.took()


# -- the receiver's process --------------------------------------------------------------------------------------


def receive(way: str, count: int, tls_directory: Path | None, pipe: Connection) -> None:
    """Tell the port, receive `count` messages, tell the CPU time."""
    tls = load_or_create_tls(tls_directory) if tls_directory else None
    pipe.send(uvloop.run(_receive(way, Sink, count, tls, pipe)))


async def _receive(
    way: str, sink_of: Callable[[int], Sink], count: int, tls: ServerTls | None, pipe: Connection
) -> float:
    sink = sink_of(count)
    context = tls.context if tls else None
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        if way == "transport":
            server = await loop.create_server(lambda: ReceivingProtocol(sink), sock=listening, ssl=context)
            pipe.send(port)
            await sink.done.wait()
            server.close()
        elif way == "websocket":
            await _receive_websocket(sink, listening, context, lambda: pipe.send(port))
        else:
            pipe.send(port)
            connected, _ = await loop.sock_accept(listening)
            assert await receive_exactly(connected, len(PREAMBLE)) == PREAMBLE
            sock: socket.socket = connected
            if context is not None:
                sock = await start_tls(connected, context, server_side=True)
            stream = Stream(sock, upload=Pace(None), download=Pace(None))
            stream.start(ReceivingEnd(sink))
            await sink.done.wait()
            stream.close()
    return time.process_time() - sink.began_cpu_s


async def _receive_websocket(
    sink: Sink, listening: socket.socket, context: ssl.SSLContext | None, ready: Callable[[], None]
) -> None:
    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket_ = web.WebSocketResponse(compress=False, max_msg_size=0)
        await socket_.prepare(request)
        async for message in socket_:
            sink.place()[:] = message.data
            sink.took()
        return socket_

    app = web.Application()
    app.router.add_get("/", serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listening, ssl_context=context).start()
    ready()
    await sink.done.wait()
    await runner.cleanup()


# -- the sender's process ----------------------------------------------------------------------------------------


def send(way: str, count: int, address: Address, pipe: Connection) -> None:
    """Send `count` messages, tell the CPU time when all of them are given to the kernel and told to end."""
    uvloop.run(_send(way, Source(count), address, pipe))


async def _send(way: str, source: Source, address: Address, pipe: Connection) -> None:
    began_cpu_s = time.process_time()
    await _start_sending(way, source, address)
    await asyncio.to_thread(pipe.recv)
    pipe.send(time.process_time() - began_cpu_s)
    for kept in _KEPT:
        if isinstance(kept, aiohttp.ClientSession):
            await kept.close()


async def _start_sending(way: str, source: Source, address: Address) -> socket.socket:
    """Send in the background; the socket."""
    context = _trusting_context() if address.fingerprint else None
    if way == "transport":
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: SendingProtocol(source), address.host, address.port, ssl=context
        )
        _KEPT.append(transport)
        return _socket_of(transport)
    if way == "websocket":
        return await _send_websocket(source, address, context)
    sock = await open_stream(address)
    stream = Stream(sock, upload=Pace(None), download=Pace(None))
    stream.start(SendingEnd(source))
    _KEPT.append(stream)
    return sock


async def _send_websocket(source: Source, address: Address, context: ssl.SSLContext | None) -> socket.socket:
    connector = aiohttp.TCPConnector(ssl=context if context is not None else True)
    session = aiohttp.ClientSession(connector=connector)
    opened = await session.ws_connect(address.url, compress=0, max_msg_size=0)
    sock = _socket_of(opened)
    tune(sock)

    async def send_all() -> None:
        while not source.spent:
            await opened.send_bytes(cast(bytes, source.payload()))

    _KEPT.extend([session, asyncio.create_task(send_all())])
    return sock


_KEPT: list[Any] = []
"""What would be closed if nobody held it."""


def _socket_of(connection: Any) -> socket.socket:
    found = connection.get_extra_info("socket")
    assert found is not None
    return cast(socket.socket, found)


def _trusting_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


# -- a receiver that reads nothing -------------------------------------------------------------------------------


def waiting_bytes(way: str, tls: ServerTls | None) -> int:
    """Bytes that wait in the sender's user space."""
    return uvloop.run(_waiting_bytes(way, tls))


async def _waiting_bytes(way: str, tls: ServerTls | None) -> int:
    source = Source(1 << 30)
    with closing(socket.socket()) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        deaf: list[socket.socket] = []
        thread = threading.Thread(target=lambda: deaf.append(_accept_deaf(way, listening, tls)), daemon=True)
        thread.start()
        address = Address("127.0.0.1", listening.getsockname()[1], tls.fingerprint if tls else b"")
        sock = await _start_sending(way, source, address)
        given = -1
        while given != source.given:
            given = source.given
            await asyncio.sleep(SETTLED_S)
        thread.join()
    header_bytes = MASKED_HEADER_BYTES if way == "websocket" else HEADER.size
    in_kernels = _queued(sock, termios.TIOCOUTQ) + _queued(deaf[0], termios.FIONREAD)
    # What TLS adds is in the kernels' queues and in no frame.
    return max(0, given * (MESSAGE_BYTES + header_bytes) - in_kernels)


def _accept_deaf(way: str, listening: socket.socket, tls: ServerTls | None) -> socket.socket:
    """Take a connection as far as its first message."""
    sock, _ = listening.accept()
    if way == "stream":
        assert sock.recv(len(PREAMBLE), socket.MSG_WAITALL) == PREAMBLE
    if tls is not None:
        sock = tls.context.wrap_socket(sock, server_side=True)
    if way == "websocket":
        asked = b""
        while not asked.endswith(b"\r\n\r\n"):
            asked += sock.recv(1)
        key = re.search(rb"(?i)sec-websocket-key: *(\S+)", asked)
        assert key is not None
        accepted = base64.b64encode(hashlib.sha1(key[1] + WEBSOCKET_GUID).digest())
        sock.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\n\r\n" % accepted
        )
    return sock


def _queued(sock: socket.socket, what: int) -> int:
    return int.from_bytes(fcntl.ioctl(sock.fileno(), what, bytes(4)), sys.byteorder)


# -- both --------------------------------------------------------------------------------------------------------


def transfer(way: str, count: int, tls_directory: Path | None) -> tuple[float, float]:
    """CPU seconds of sender and receiver."""
    fresh = multiprocessing.get_context("spawn")
    (here, there), (sending_here, sending_there) = fresh.Pipe(), fresh.Pipe()
    receiver = fresh.Process(target=receive, args=(way, count, tls_directory, there), daemon=True)
    receiver.start()
    fingerprint = load_or_create_tls(tls_directory).fingerprint if tls_directory else b""
    address = Address("127.0.0.1", here.recv(), fingerprint)
    sender = fresh.Process(target=send, args=(way, count, address, sending_there), daemon=True)
    sender.start()
    received_s = here.recv()
    sending_here.send("end")
    sent_s = sending_here.recv()
    for process in (sender, receiver):
        process.join()
    return sent_s, received_s


def waiting_in_own_process(way: str, tls_directory: Path | None) -> int:
    fresh = multiprocessing.get_context("spawn")
    here, there = fresh.Pipe()
    process = fresh.Process(target=_tell_waiting, args=(way, tls_directory, there), daemon=True)
    process.start()
    found: int = here.recv()
    process.kill()
    process.join()
    return found


def _tell_waiting(way: str, tls_directory: Path | None, pipe: Connection) -> None:
    pipe.send(waiting_bytes(way, load_or_create_tls(tls_directory) if tls_directory else None))


def figures_of(way: str, count: int, repeat: int, tls_directory: Path | None) -> Figures:
    runs = [transfer(way, count, tls_directory) for _ in range(repeat)]
    gb = count * MESSAGE_BYTES / 1e9
    return {
        "send_cpu_s_per_gb": round(statistics.median(sent_s for sent_s, _ in runs) / gb, 2),
        "receive_cpu_s_per_gb": round(statistics.median(received_s for _, received_s in runs) / gb, 2),
        "waiting_bytes": waiting_in_own_process(way, tls_directory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    count = options.size_mib * (1 << 20) // MESSAGE_BYTES
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as directory:
        for tls_directory in (None, Path(directory)):
            for way in WAYS:
                name = way + ("+tls" if tls_directory else "")
                found[name] = figures_of(way, count, options.repeat, tls_directory)
                print(name, *(f"{key}={value}" for key, value in found[name].items()), flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
