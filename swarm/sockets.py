"""The sockets under streams: opened, under TLS where the address has a certificate, and tuned for late binding."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from typing import Any

from swarm.errors import PeerUnreachable
from swarm.types import Address

OPEN_S = 10.0
"""Time limit for connecting and for TLS."""

CONGESTION = b"cubic"
"""With many application-limited flows over one uplink BBR left 43 % of it idle."""

DEAD_AFTER_MS = 20_000
"""Unacknowledged data of that age ends a link (TCP_USER_TIMEOUT)."""

PREAMBLE = b"\0echo-stream\n"
"""Its first byte begins neither TLS nor HTTP."""

UNSENT_BYTES = 16 * 1024
"""What the kernel may hold unsent on a new link (TCP_NOTSENT_LOWAT)."""

TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


async def open_stream(address: Address) -> socket.socket:
    """A connected socket, preamble sent and TLS done; PeerUnreachable if that fails."""
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
    family, kind, proto, _, where = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setblocking(False)
        tune(sock)
        await loop.sock_connect(sock, where)
        await loop.sock_sendall(sock, PREAMBLE)
        if not address.fingerprint:
            return sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        secure = await start_tls(sock, context, server_side=False)
        sock = secure
        certificate = secure.getpeercert(binary_form=True) or b""
        if hashlib.sha256(certificate).digest() != address.fingerprint:
            raise PeerUnreachable(f"the certificate of {address.authority} is not the one that was named")
        return secure
    except BaseException:
        sock.close()
        raise


async def start_tls(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
    """TLS over a connected, non-blocking socket, which then belongs to the returned one."""
    secure = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    try:
        while True:
            try:
                secure.do_handshake()
                return secure
            except ssl.SSLWantReadError:
                await wait_for(secure, writable=False)
            except ssl.SSLWantWriteError:
                await wait_for(secure, writable=True)
    except BaseException:
        secure.close()
        raise


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send before a Stream owns the socket: a few hundred bytes."""
    left = memoryview(data)
    while left:
        try:
            left = left[sock.send(left) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            await wait_for(sock, writable=True)
        except ssl.SSLWantReadError:
            await wait_for(sock, writable=False)


async def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Receive before a Stream owns the socket, and nothing beyond."""
    data = bytearray()
    while len(data) < nbytes:
        try:
            part = sock.recv(nbytes - len(data))
        except (BlockingIOError, ssl.SSLWantReadError):
            await wait_for(sock, writable=False)
            continue
        except ssl.SSLWantWriteError:
            await wait_for(sock, writable=True)
            continue
        if not part:
            raise ConnectionResetError("the other side closed the link")
        data += part
    return bytes(data)


async def wait_for(sock: socket.socket, *, writable: bool) -> None:
    """Until `sock` can be read or written."""
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


def tune(sock: socket.socket, *, receive_bytes: int | None = None) -> None:
    """Late binding, and an end within half a minute when the other side has vanished."""
    options: list[tuple[int, int, Any]] = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    for name, value in (
        ("TCP_CONGESTION", CONGESTION),
        ("TCP_USER_TIMEOUT", DEAD_AFTER_MS),
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    if receive_bytes is not None:
        options.append((socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes))
    for level, option, value in options:
        try:
            sock.setsockopt(level, option, value)
        except OSError:
            pass  # a kernel without it, or without cubic: slower, not wrong
