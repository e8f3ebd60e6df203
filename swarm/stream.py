"""Framed streams between nodes, on the port that serves HTTP: long-lived, both ways, written as late as possible.

A stream begins with PREAMBLE, then TLS where the address has a certificate, then frames: a header of 32 bytes and a
payload. Payload of chunks is received where it belongs and sent from where it lies. A link is asked for its next frame
only when the kernel holds little that it has not sent yet (UNSENT_S), one chunk per wake-up, so that what goes to whom
is decided late and all links have their turn. Sockets are used directly: under asyncio's transports another
64 KiB per connection would wait out of reach (docs/decisions/0006).
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import ssl
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swarm.errors import ProtocolError
from swarm.pace import Pace
from swarm.sockets import TCP_NOTSENT_LOWAT, UNSENT_BYTES
from swarm.types import NodeId, VersionId

HEADER = struct.Struct(">BBHIIIQ8s")

UNSENT_S = 0.05
MOST_UNSENT_BYTES = 512 * 1024
"""What the kernel may hold unsent on one link (TCP_NOTSENT_LOWAT): what it sends in UNSENT_S, because so long may a
busy machine take to give it more, and not much less than a chunk."""

RATE_WEIGHT = 0.3

READ_BYTES = 256 * 1024
"""Read at most so much in one turn of the loop, that other links have theirs."""

WAKE_BYTES = 32 * 1024
"""So much of a chunk is waited for before it is read; a socket's buffer takes four times as much."""


@dataclass(slots=True)
class Frame:
    """A header. `kind`, `index` and `via` are those of a chunk (broadcast/notes.py)."""

    type: int
    size: int
    version: VersionId
    kind: int = 0
    index: int = 0
    via: bytes = b"\0" * 8

    def pack(self) -> bytes:
        version = self.version
        return HEADER.pack(
            self.type, self.kind, 0, self.size, self.index, version.incarnation, version.version, self.via
        )


def unpack_frame(data: bytes | bytearray) -> Frame:
    """The header in exactly HEADER.size bytes."""
    type_, kind, _, size, index, incarnation, version, via = HEADER.unpack(data)
    return Frame(type_, size, VersionId(incarnation=incarnation, version=version), kind, index, via)


@dataclass(slots=True)
class Outgoing:
    """A frame for a link, and what to call when the kernel has all of it."""

    header: bytes
    payload: bytes | memoryview
    sent: Callable[[], None] | None = None


class LinkEnd(Protocol):
    """Who owns a stream."""

    def pull(self) -> Outgoing | None:
        """The next frame to send, or None until the next `wake`."""

    def place(self, frame: Frame) -> memoryview:
        """Where the payload of `frame` is to be received. ProtocolError for a frame that may not come."""

    def received(self, frame: Frame, payload: memoryview) -> None:
        """All of `frame` came. ProtocolError ends the link."""

    def closed(self, error: Exception | None) -> None:
        """The stream is no more; called once."""


@dataclass(slots=True)
class Incoming:
    """A stream that somebody opened to this node, after its preamble and TLS. Whoever takes it closes the socket, and
    calls `leave` when that is done; `prove` says whose it is, and raises if that node has too many."""

    sock: socket.socket
    prove: Callable[[NodeId], None]
    leave: Callable[[], None]


class Stream:
    """One open socket with frames both ways. It calls its LinkEnd from the event loop."""

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
        self._paused_writing = False
        self._closed = False
        self._lowat = 1
        self._unsent = UNSENT_BYTES
        self._sent_before = 0
        self._rate = 0.0
        self.sent_bytes = 0

    def start(self, end: LinkEnd) -> None:
        self._end = end
        self._loop.add_reader(self._fd, self._on_readable)
        self.wake()

    def wake(self) -> None:
        """There may be something to send. The kernel is asked whether it takes more only once it has refused."""
        if not (self._writing or self._paused_writing or self._closed):
            self._writing = True
            self._loop.call_soon(self._on_writable)

    def adapt(self, elapsed: float) -> None:
        """Fit what the kernel may hold unsent to what was sent in the last `elapsed` seconds."""
        rate = (self.sent_bytes - self._sent_before) / elapsed
        self._sent_before = self.sent_bytes
        self._rate += RATE_WEIGHT * (rate - self._rate)
        wanted = int(min(MOST_UNSENT_BYTES, max(UNSENT_BYTES, UNSENT_S * self._rate)))
        if not 0.8 * self._unsent <= wanted <= 1.25 * self._unsent:
            self._unsent = wanted
            try:
                self._sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, wanted)
            except OSError:
                pass  # a kernel without it, as in tune

    def divert(self, into: memoryview) -> None:
        """Receive the payload that is under way into another place: what came of it so far is of no use."""
        assert len(into) == len(self._into)
        self._into = into

    def close(self, error: Exception | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._polled:
            self._loop.remove_writer(self._fd)
        self._sock.close()
        self._end.closed(error)

    # -- writing ---------------------------------------------------------------------------------------------

    def _on_writable(self) -> None:
        try:
            while self._write_some():
                pass
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass  # later
        except OSError as error:
            self.close(error)
        if self._writing and not self._polled and not self._closed:
            self._polled = True
            self._loop.add_writer(self._fd, self._on_writable)

    def _write_some(self) -> bool:
        """Send what is left of the frame, or begin the next; False when this turn is over."""
        if self._closed:
            return False
        if not self._left and not self._begin():
            return False
        count = self._sock.send(self._left[0]) if self._tls else self._sock.sendmsg(self._left)
        self.sent_bytes += count
        self._upload.took(count)
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
        if not self._upload.admits(self._resume_writing):
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
                if not self._download.admits(self._resume_reading):
                    self._loop.remove_reader(self._fd)
                    return
                count = self._sock.recv_into(self._into[self._filled :])
                if count == 0:
                    raise ConnectionResetError("the other side closed the link")
                budget -= count
                self._download.took(count)
                self._filled += count
                if self._filled == len(self._into):
                    self._filled_up()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except (OSError, ProtocolError) as error:
            self.close(error)
            return
        if isinstance(self._sock, ssl.SSLSocket) and not self._closed and self._sock.pending():
            self._loop.call_soon(self._on_readable_again)

    def _waits_for_more(self) -> bool:
        """Whether to be woken only when more of a chunk is there: it comes in a dozen packets, and each would wake us.

        Only before any of the chunk was read: of a TLS record that was read in part the kernel knows no size.
        """
        if self._frame is None or self._filled:
            return False
        wanted = min(self._frame.size, WAKE_BYTES)
        if self._lowat != 1 or self._available() >= wanted:
            self._set_lowat(1)
            return False
        self._set_lowat(wanted)
        return True

    def _available(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)

    def _set_lowat(self, nbytes: int) -> None:
        if self._lowat != nbytes:
            self._lowat = nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _on_readable_again(self) -> None:
        """What TLS has decrypted already wakes nobody."""
        if not self._closed:
            self._on_readable()

    def _resume_reading(self) -> None:
        if not self._closed:
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
