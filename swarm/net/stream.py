"""Framed streams between nodes, on the port that serves HTTP: long-lived, two-way, and filled as late as possible.

A stream begins with PREAMBLE, then TLS if the address has a certificate, then frames: a header of 32 bytes and a
payload. A chunk is sent straight from its file. A link is asked for its next frame only when the kernel holds little
unsent (UNSENT_S), one chunk per wake-up, so that the choice of what goes to whom is made late and all links get their
turn. Sockets are used directly: asyncio's transports would keep another 64 KiB per connection out of reach
(docs/decisions/0006). pace.py caps what a node sends or receives in all.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import socket
import ssl
import struct
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from aiohappyeyeballs import AddrInfoType, start_connection

from swarm.errors import PeerUnreachable, ProtocolError
from swarm.net.pace import Pace
from swarm.types import Address, NodeId, VersionId

HEADER = struct.Struct(">BBHIIIQ8s")
UNSENT_S = 0.05
MAX_UNSENT_BYTES = 512 * 1024
"""On one link the kernel may hold unsent what the link sends in UNSENT_S (TCP_NOTSENT_LOWAT), because a busy machine
takes that long to refill it. The largest size is not much less than a chunk."""

READ_BYTES = 256 * 1024  # Largest read in one turn of the loop, so that other links get their turns
WAKE_BYTES = 32 * 1024  # Bytes of a chunk to wait for before the first read; a socket's buffer takes four times as much


@dataclass(slots=True)
class Frame:
    """A frame's header. Only chunks use `kind`, `index` and `via` (broadcast/notes.py); they and notes are of a
    `segment`, within which chunks are counted."""

    type: int
    size: int
    version: VersionId
    kind: int = 0
    index: int = 0
    via: bytes = b"\0" * 8
    segment: int = 0

    def pack(self) -> bytes:
        at = self.version
        return HEADER.pack(
            self.type, self.kind, self.segment, self.size, self.index, at.incarnation, at.version, self.via
        )


def unpack_frame(data: bytes | bytearray) -> Frame:
    """Decode the header in exactly HEADER.size bytes."""
    type_, kind, segment, size, index, incarnation, version, via = HEADER.unpack(data)
    return Frame(type_, size, VersionId(incarnation=incarnation, version=version), kind, index, via, segment)


@dataclass(slots=True)
class Outgoing:
    """A frame to send. `sent` is called when the kernel has all of it."""

    header: bytes
    payload: bytes | memoryview
    sent: Callable[[], None] | None = None


class LinkEnd(Protocol):
    """The owner of a stream. Its methods are called from the event loop."""

    def pull(self) -> Outgoing | None:
        """Return the next frame to send, or None to wait for the next `wake`."""

    def place(self, frame: Frame) -> memoryview:
        """Return the buffer for the payload of `frame`. Raise ProtocolError if such a frame may not come."""

    def received(self, frame: Frame, payload: memoryview) -> None:
        """Take a complete frame. A ProtocolError ends the link."""

    def closed(self, error: Exception | None) -> None:
        """Hear that the stream has ended. This is called once."""


@dataclass(slots=True)
class Incoming:
    """A stream that another node opened to this one, after preamble and TLS. Its taker calls `prove` with the node at
    the other end, which raises if that node has too many streams; at the end it closes the socket and calls `leave`."""

    sock: socket.socket
    prove: Callable[[NodeId], None]
    leave: Callable[[], None]


class Stream:
    """One open socket with frames in both directions."""

    def __init__(self, sock: socket.socket, *, upload: Pace, download: Pace) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._loop = asyncio.get_running_loop()
        self._upload = upload
        self._download = download
        self._header = memoryview(bytearray(HEADER.size))
        self._into = self._header
        self._filled = 0
        self._frame: Frame | None = None
        self._out: Outgoing | None = None
        self._left: list[memoryview] = []
        self._writing = False
        self._polled = False
        self._paused_writing = self._paused_reading = False
        self._closed = False
        self._lowat = 1
        self._in_record = False
        self._unsent = UNSENT_BYTES
        self._sent_before = 0
        self._rate = 0.0
        self.sent_bytes = 0

    def start(self, end: LinkEnd, on_end: Callable[[], None] = lambda: None) -> None:
        """Serve `end`. When the stream has ended, call `on_end`, then `end.closed`."""
        self._end = end
        self._on_end = on_end
        self._loop.add_reader(self._fd, self._on_readable)
        self.wake()

    def wake(self) -> None:
        """Look for something to send. The first try comes without polling the socket."""
        if not (self._writing or self._paused_writing or self._closed):
            self._writing = True
            self._loop.call_soon(self._on_writable)

    def adapt(self, elapsed: float) -> None:
        """Fit what the kernel may hold unsent to the pace of the last `elapsed` seconds."""
        rate = (self.sent_bytes - self._sent_before) / elapsed
        self._sent_before = self.sent_bytes
        self._rate += 0.3 * (rate - self._rate)
        wanted = int(min(MAX_UNSENT_BYTES, max(UNSENT_BYTES, UNSENT_S * self._rate)))
        if not 0.8 * self._unsent <= wanted <= 1.25 * self._unsent:
            self._unsent = wanted
            with suppress(OSError):  # a kernel without it, as in tune
                self._sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, wanted)

    @property
    def unacknowledged_bytes(self) -> int:
        """Return what the kernel took and the other end has not confirmed: it may not have left this machine."""
        with suppress(OSError):  # where a kernel does not tell
            return int.from_bytes(fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0\0\0\0"), sys.byteorder)
        return 0

    def close(self, error: Exception | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._polled:
            self._loop.remove_writer(self._fd)
        self._sock.close()
        self._on_end()
        self._end.closed(error)

    # -- writing ---------------------------------------------------------------------------------------------

    def _on_writable(self) -> None:
        try:
            while self._write_some():
                pass
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass  # the event loop says when to go on
        except OSError as error:
            self.close(error)
        if self._writing and not self._polled and not self._closed:
            self._polled = True
            self._loop.add_writer(self._fd, self._on_writable)

    def _write_some(self) -> bool:
        """Send what is left of the frame, or begin the next. Return False when this turn is over."""
        if self._closed:
            return False
        if not self._left and not self._begin():
            return False
        count = self._sock.send(self._left[0]) if self._tls else self._sock.sendmsg(self._left)
        self.sent_bytes += count
        self._upload.took(self._fd, count)
        while count:
            first = self._left[0]
            if count < len(first):
                self._left[0] = first[count:]
                return False
            count -= len(first)
            del self._left[0]
        if self._left:
            return True
        out, self._out = self._out, None
        assert out is not None
        if out.sent is not None:
            out.sent()
            return False  # one chunk, then the others' turn
        return True

    def _begin(self) -> bool:
        if not self._upload.admits(self._fd, self._resume_writing):
            self._idle()
            self._paused_writing = True
            return False
        self._out = self._end.pull()
        if self._out is None:
            self._idle()
            return False
        self._left = [memoryview(self._out.header)]
        if len(self._out.payload):
            self._left.append(memoryview(self._out.payload))
        return True

    def _idle(self) -> None:
        self._writing = False
        if self._polled:
            self._polled = False
            self._loop.remove_writer(self._fd)

    def _resume_writing(self) -> None:
        self._paused_writing = False
        self.wake()

    # -- reading ---------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        budget = READ_BYTES
        try:
            while budget > 0 and not self._closed and not self._waits_for_more():
                if not self._download.admits(self._fd, self._resume_reading):
                    self._paused_reading = True
                    self._loop.remove_reader(self._fd)
                    return
                count = self._sock.recv_into(self._into[self._filled : self._filled + budget])
                self._in_record = False
                if count == 0:
                    raise ConnectionResetError("the other side closed the link")
                budget -= count
                self._download.took(self._fd, count)
                self._filled += count
                if self._filled == len(self._into):
                    self._filled_up()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._in_record = self._tls
            return
        except (OSError, ProtocolError) as error:
            self.close(error)
            return
        if isinstance(self._sock, ssl.SSLSocket) and not self._closed and self._sock.pending():
            self._loop.call_soon(self._on_readable_again)

    def _waits_for_more(self) -> bool:
        """Return True if it is better to sleep until more of a chunk is there: each of its dozen packets would wake us.

        This is decided before any of the chunk is read, or of its first TLS record: what TLS has taken of a record that
        is not whole yet, the kernel does not count, so on a quiet link the rest would never be enough to wake us.
        """
        if self._frame is None or self._filled or self._in_record:
            return False
        wanted = min(self._frame.size, WAKE_BYTES)
        available = int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)
        waits = self._lowat == 1 and available < wanted
        self._set_lowat(wanted if waits else 1)
        return waits

    def _set_lowat(self, nbytes: int) -> None:
        if self._lowat != nbytes:
            self._lowat = nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _on_readable_again(self) -> None:
        # Asked for before the stream had to wait for its turn, perhaps.
        if not (self._closed or self._paused_reading):
            self._on_readable()

    def _resume_reading(self) -> None:
        if not self._closed:
            self._paused_reading = False
            self._loop.add_reader(self._fd, self._on_readable)
            self._loop.call_soon(self._on_readable_again)

    def _filled_up(self) -> None:
        self._filled = 0
        if self._frame is None:
            frame = unpack_frame(self._header.tobytes())
            if frame.size:
                self._frame, self._into = frame, self._end.place(frame)
                assert len(self._into) == frame.size
            else:
                self._end.received(frame, self._header[:0])
            return
        frame, payload = self._frame, self._into
        self._frame, self._into = None, self._header
        self._end.received(frame, payload)


OPEN_S = 10.0  # Time limit for connecting and TLS
HEAD_START_S = 0.25  # Of one address of a name over the next, as RFC 8305 says and HTTP does
PREAMBLE = b"\0echo-stream\n"  # Neither TLS nor HTTP begins with its first byte
UNSENT_BYTES = 16 * 1024  # What the kernel may hold unsent on a new link (TCP_NOTSENT_LOWAT)
TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
T = TypeVar("T")


async def open_stream(address: Address) -> socket.socket:
    """Return a connected socket, with the preamble sent and TLS done. Raise PeerUnreachable if that fails."""
    try:
        async with asyncio.timeout(OPEN_S):
            return await _open(address)
    except TimeoutError as error:
        raise PeerUnreachable(f"{address.authority} did not open a stream within {OPEN_S:g} s") from error
    except OSError as error:
        raise PeerUnreachable(f"{address.authority} cannot be reached for a stream ({error})") from error


async def _open(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    sock = await start_connection(found, happy_eyeballs_delay=HEAD_START_S, socket_factory=_tuned)
    try:
        await loop.sock_sendall(sock, PREAMBLE)
        if not address.fingerprint:
            return sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        sock = secure = await start_tls(sock, context, server_side=False)
        certificate = secure.getpeercert(binary_form=True) or b""
        if hashlib.sha256(certificate).digest() != address.fingerprint:
            raise PeerUnreachable(f"the certificate of {address.authority} is not the one that was named")
        return secure
    except BaseException:
        sock.close()
        raise


def _tuned(info: AddrInfoType) -> socket.socket:
    """Return a socket for one address of a name. What is tuned has to be there before it connects."""
    sock = socket.socket(*info[:3])
    tune(sock)
    return sock


async def start_tls(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
    """Start TLS on a connected, non-blocking socket. The returned socket takes it over."""
    secure = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    try:
        await _when_ready(secure, secure.do_handshake, writable=False)
    except BaseException:
        secure.close()
        raise
    return secure


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send a few hundred bytes before a Stream owns the socket."""
    left = memoryview(data)
    while left:
        left = left[await _when_ready(sock, partial(sock.send, left), writable=True) :]


async def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Receive exactly `nbytes` before a Stream owns the socket."""
    data = bytearray()
    while len(data) < nbytes:
        part = await _when_ready(sock, partial(sock.recv, nbytes - len(data)), writable=False)
        if not part:
            raise ConnectionResetError("the other side closed the link")
        data += part
    return bytes(data)


async def _when_ready(sock: socket.socket, attempt: Callable[[], T], *, writable: bool) -> T:
    """Return what `attempt` returns once the socket is ready. Without TLS, `writable` says what to wait for."""
    while True:
        try:
            return attempt()
        except ssl.SSLWantReadError:
            await wait_for(sock, writable=False)
        except ssl.SSLWantWriteError:
            await wait_for(sock, writable=True)
        except BlockingIOError:
            await wait_for(sock, writable=writable)


async def wait_for(sock: socket.socket, *, writable: bool) -> None:
    """Wait until `sock` can be written, or read."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    fd = sock.fileno()
    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fd, set_ready)
    try:
        await ready
    finally:
        remove(fd)


def tune(sock: socket.socket) -> None:
    """Keep little unsent in the kernel, and end the link within half a minute once the other side has vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (TCP_NOTSENT_LOWAT, UNSENT_BYTES),
        # With many application-limited flows over one uplink, BBR left 43 % of it idle.
        (getattr(socket, "TCP_CONGESTION", None), b"cubic"),
        # Unacknowledged data of this age (in ms) ends a link.
        (getattr(socket, "TCP_USER_TIMEOUT", None), 20_000),
        (getattr(socket, "TCP_KEEPIDLE", None), 10),
        (getattr(socket, "TCP_KEEPINTVL", None), 5),
        (getattr(socket, "TCP_KEEPCNT", None), 3),
    ):
        if option is not None:
            with suppress(OSError):  # a kernel without it, or without cubic: slower, not wrong
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
