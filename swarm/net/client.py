"""The little HTTP that every part shares: capped bodies, one protocol number, errors that say whose fault it was.

Under TLS a client pins the certificate that was named to it; above TLS, and without it, requests are signed
(net/sessions.py).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from yarl import URL

from swarm.errors import PeerUnreachable, ProtocolError, TooLarge, UserError
from swarm.net.sessions import (
    AUTH_HEADER,
    NONCE_BYTES,
    SESSION_ID_BYTES,
    SESSION_MESSAGE_BYTES,
    ClientSession,
    ServerSessions,
    Unauthorized,
    ask_session,
    open_grant,
)
from swarm.net.signing import SigningKey
from swarm.net.wire import PROTOCOL, PROTOCOL_HEADER
from swarm.types import Address, NodeId

SESSION_PATH = "/v1/session"
SESSION_S = 10.0  # Time limit for opening a session: two round trips and two signatures
CONNECT_S = 5.0  # Longest wait for a TCP connection: three SYN retries on a home line

MAX_CONNECTIONS = 8
"""Connections that one client opens to one peer: a question held open, a beat, a submission, four chunks, one spare."""

SILENT = "is the address right, and do firewalls and routers let the port through?"
"""What to look at where nothing answers at all."""

ERROR_TEXT_BYTES = 500  # How much of a peer's error text is read and shown
FINGERPRINT_BYTES = 32  # SHA-256 of a certificate in DER
NUMBER = re.compile("[0-9]{1,9}")

NEEDLESS_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""What aiohttp would add to every request: 130 bytes that say nothing to a node."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ON_SIGNED: web.RequestKey[Callable[[NodeId], None]] = web.RequestKey("on_signed")
"""Set by a server that wants to hear whose request it was, as soon as that is proven. It may raise."""


class Gone(ProtocolError):
    """The peer no longer has (or never had) what was asked for."""


class OtherProtocol(ProtocolError):
    """The peer speaks another protocol; the message says which side has to be upgraded."""


class OtherCertificate(PeerUnreachable):
    """Another certificate than the one that was named is shown."""


class OtherEncryption(PeerUnreachable):
    """Something answers that does not speak TLS, where TLS was named or expected."""


class Forbidden(ProtocolError):
    """The sender is proven, and asks for what is another node's."""


class TooSlow(ProtocolError):
    """A body that comes too slowly. Refused, so that a sender cannot hold a handler for ever."""


class Crowded(ProtocolError):
    """More connections or requests than one node may have."""


class Busy(PeerUnreachable):
    """The peer asks for patience: 429 or 503. `retry_after_s` is its hint."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowLine(PeerUnreachable):
    """408: the peer did not wait for the rest of our body. The line's fault; a smaller body may get through."""


class Peer(Protocol):
    """Whoever can be asked over HTTP: once (PeerClient), or until it answers (node/link.py)."""

    async def get(self, path: str, *, cap_bytes: int, timeout_s: float) -> bytes: ...

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """How slowly a request's body may come."""

    read_s: float = 20.0  # For the whole body: a sender that keeps the least rate for ever would hold a handler as long
    least_bytes_per_s: float = 1000.0  # A fortieth of a slow uplink; whoever sends less means to hold the handler
    grace_s: float = 2.0  # How far a sender may fall behind that: a lost segment or two on a long line

    def due_s(self, received: int) -> float:
        """Seconds from the start until more than `received` bytes have to be there."""
        return min(self.read_s, self.grace_s + received / self.least_bytes_per_s)


BODY_LIMITS = BodyLimits()


class PeerClient:
    """HTTP to one peer. Every call has a time limit and every body a cap.

    With `key` and `server` every POST is signed, within a session that is opened at the first one. An address with a
    fingerprint is called over TLS, and no other certificate than that one is spoken to.
    """

    def __init__(self, address: Address, *, key: SigningKey | None = None, server: NodeId | None = None) -> None:
        if len(address.fingerprint) not in (0, FINGERPRINT_BYTES):
            raise ProtocolError(f"{address.authority} is named with a fingerprint that is no SHA-256")
        self.base_url = address.url
        self._fingerprint = address.fingerprint
        self._signs_for: tuple[SigningKey, NodeId] | None = None
        self._granted: ClientSession | None = None
        self._opening = asyncio.Lock()
        if key is not None and server is not None:
            self.sign(key, server)
        self._session = aiohttp.ClientSession(
            headers={PROTOCOL_HEADER: str(PROTOCOL)},
            skip_auto_headers=NEEDLESS_HEADERS,
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, ssl=aiohttp.Fingerprint(address.fingerprint) if address.fingerprint else True
            ),
            auto_decompress=False,
        )

    async def __aenter__(self) -> PeerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; calls under way fail."""
        await self._session.close()

    def sign(self, key: SigningKey, server: NodeId) -> None:
        """Sign every POST from now on, with `key` and for `server` alone."""
        self._signs_for = (key, server)
        self._granted = None

    async def get(self, path: str, *, cap_bytes: int, timeout_s: float) -> bytes:
        """The body at `path`."""
        return await self._call("GET", path, None, cap_bytes, timeout_s)

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        """The answer to `body`. A server that knows our session no more is asked for a new one, once."""
        if self._signs_for is None:
            return await self._call("POST", path, body, cap_bytes, timeout_s)
        try:
            # One limit for all of it: a server that is slow to open sessions must not hold callers one after another.
            async with asyncio.timeout(timeout_s):
                return await self._post_signed(path, body, cap_bytes, timeout_s)
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.base_url} did not answer within {timeout_s:g} s") from error

    async def signed_header(self, method: str, path: str, body: bytes) -> str:
        """A value of AUTH_HEADER for what goes another way than HTTP, within this client's session."""
        granted = await self._session_other_than(None)
        return granted.header(method, path, body)

    async def renew_session(self) -> None:
        """The server seems not to know the session any more: open another one."""
        await self._session_other_than(self._granted)

    async def _post_signed(self, path: str, body: bytes, cap_bytes: int, timeout_s: float) -> bytes:
        granted = await self._session_other_than(None)
        try:
            return await self._call("POST", path, body, cap_bytes, timeout_s, granted)
        except Unauthorized:
            granted = await self._session_other_than(granted)
            return await self._call("POST", path, body, cap_bytes, timeout_s, granted)

    async def _session_other_than(self, refused: ClientSession | None) -> ClientSession:
        """The session in use, or a new one if that is `refused`. Calls that were refused together open one."""
        async with self._opening:
            if self._granted is None or self._granted is refused:
                self._granted = await self._open_session()
            return self._granted

    async def _open_session(self) -> ClientSession:
        assert self._signs_for is not None
        key, server = self._signs_for
        nonce = secrets.token_bytes(NONCE_BYTES)
        wish = ask_session(key, server=server, fingerprint=self._fingerprint, nonce=nonce)
        grant = await self._call("POST", SESSION_PATH, wish, SESSION_MESSAGE_BYTES, SESSION_S)
        return open_grant(grant, key, server=server, fingerprint=self._fingerprint, nonce=nonce)

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        cap_bytes: int,
        timeout_s: float,
        signer: ClientSession | None = None,
    ) -> bytes:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        headers = {AUTH_HEADER: signer.header(method, path, body or b"")} if signer else {}
        # As it stands: the path is signed, so nothing may quote it anew.
        url = URL(self.base_url + path, encoded=True)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise await _refusal(answer, self.base_url)
                return await read_capped(answer.content, cap_bytes)
        except aiohttp.ConnectionTimeoutError as error:
            raise PeerUnreachable(
                f"{self.base_url} cannot be reached: no answer within {CONNECT_S:g} s; {SILENT}"
            ) from error
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.base_url} did not answer within {timeout_s:g} s") from error
        except aiohttp.ServerFingerprintMismatch as error:
            raise OtherCertificate(_mismatch_line(self.base_url, error.got)) from error
        except ssl.SSLError as error:
            why = "it does not speak TLS, as was named; if it was set up anew, ask for its new join line"
            raise OtherEncryption(f"{self.base_url} cannot be reached: {why}") from error
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            raise PeerUnreachable(f"{self.base_url} cannot be reached: {_reason(error)}") from error


async def certificate_of(host: str, port: int, timeout_s: float) -> bytes:
    """SHA-256 of the certificate that a TLS server presents, for trust on first use. PeerUnreachable if none does."""
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=unverified)
    except TimeoutError as error:
        raise PeerUnreachable(
            f"{host}:{port} cannot be reached: it did not show a certificate within {timeout_s:g} s; {SILENT}"
        ) from error
    except ssl.SSLError as error:
        raise OtherEncryption(
            f"{host}:{port} does not answer with TLS; if it is an echo-node without (--no-tls), name it as "
            f"http://{host}:{port}"
        ) from error
    except (OSError, UnicodeError) as error:
        raise PeerUnreachable(f"{host}:{port} cannot be reached: {_reason(error)}") from error
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return hashlib.sha256(certificate).digest()


def plain_address(url: str) -> Address:
    """The address behind a URL like http://host:7700."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise UserError(f"{url!r} is not a URL like http://host:7700")
    return Address(host=parts.hostname, port=parts.port)


async def read_capped(
    stream: aiohttp.StreamReader, cap_bytes: int, *, progress: Callable[[int], None] = lambda size: None
) -> bytes:
    """Everything from `stream`; TooLarge as soon as more than `cap_bytes` came. `progress` hears of every part."""
    parts: list[bytes] = []
    size = 0
    async for part in stream.iter_any():
        size += len(part)
        if size > cap_bytes:
            raise TooLarge(f"a body is over the cap of {cap_bytes} bytes")
        parts.append(part)
        progress(size)
    return b"".join(parts)


async def read_body(request: web.Request, cap_bytes: int, *, limits: BodyLimits = BODY_LIMITS) -> bytes:
    """A request's body, capped in size and time; TooSlow once its sender has fallen behind the least rate."""
    if request.content_length is not None and request.content_length > cap_bytes:
        raise TooLarge(f"a body of {request.content_length} bytes is over the cap of {cap_bytes}")
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(began + limits.due_s(0)) as deadline:
            return await read_capped(
                request.content, cap_bytes, progress=lambda size: deadline.reschedule(began + limits.due_s(size))
            )
    except TimeoutError as error:
        raise TooSlow(
            f"the body came slower than {limits.least_bytes_per_s:g} bytes a second or not within {limits.read_s:g} s"
        ) from error
    except web.RequestPayloadError as error:
        raise ProtocolError(f"the body is broken: {error}") from error


async def read_signed(
    request: web.Request, cap_bytes: int, sessions: ServerSessions, *, limits: BodyLimits = BODY_LIMITS
) -> tuple[NodeId, bytes]:
    """Who sent a request, proven, and its body. Of a sender without a session no body is read."""
    header = request.headers.get(AUTH_HEADER)
    sessions.check_header(header, now=time.monotonic())
    body = await read_body(request, cap_bytes, limits=limits)
    node = sessions.check(header, request.method, request.raw_path, body, now=time.monotonic())
    if (on_signed := request.get(ON_SIGNED)) is not None:
        on_signed(node)
    return node, body


def session_route(sessions: ServerSessions) -> web.RouteDef:
    """Answers POST /v1/session."""

    async def answer(request: web.Request) -> web.Response:
        wish = await read_body(request, SESSION_MESSAGE_BYTES)
        return binary(sessions.open(wish, now=time.monotonic(), session_id=secrets.token_bytes(SESSION_ID_BYTES)))

    return web.post(SESSION_PATH, answer)


def binary(body: bytes) -> web.Response:
    """An answer of msgpack or raw bytes."""
    return web.Response(body=body, content_type="application/octet-stream")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse another protocol with 426, and answer a peer's faults with 4xx instead of a stack trace."""
    spoken = request.headers.get(PROTOCOL_HEADER)
    if request.path != "/v1/status" and spoken != str(PROTOCOL):
        return web.Response(status=426, text=_upgrade_line(spoken), headers={PROTOCOL_HEADER: str(PROTOCOL)})
    try:
        return await handler(request)
    except ProtocolError as error:
        status = next((status for kind, status in STATUS_OF_FAULT if isinstance(error, kind)), 400)
        answer = web.Response(status=status, text=str(error), headers={"Retry-After": "1"} if status == 429 else None)
        if status == 408:
            # The rest of the body is still on its way: what is sent next over this connection would wait behind it.
            answer.force_close()
        return answer


STATUS_OF_FAULT: tuple[tuple[type[ProtocolError], int], ...] = (
    (TooLarge, 413),
    (Unauthorized, 401),
    (Forbidden, 403),
    (TooSlow, 408),
    (Crowded, 429),
)
"""How a peer hears of its fault; every other one is 400."""


def _upgrade_line(spoken: str | None) -> str:
    if spoken is None or not NUMBER.fullmatch(spoken):
        return f"this is an echo-node that speaks protocol {PROTOCOL}; use the echo-node client"
    side = "this node, the one you called," if int(spoken) > PROTOCOL else "your node"
    return f"protocol {spoken} met protocol {PROTOCOL}: {side} has to be upgraded"


async def _refusal(answer: aiohttp.ClientResponse, peer: str) -> Exception:
    said = (await answer.content.read(ERROR_TEXT_BYTES)).decode(errors="replace").strip()
    # It may be shown on a terminal.
    text = "".join(c if c.isprintable() else "?" for c in said)
    if answer.status == 426:
        theirs = answer.headers.get(PROTOCOL_HEADER, "")
        return other_protocol(peer, int(theirs)) if NUMBER.fullmatch(theirs) else OtherProtocol(f"{peer}: {text}")
    if answer.status == 401:
        return Unauthorized(f"{peer} does not know who asks: {text}")
    if answer.status == 403:
        return Forbidden(f"{peer} refused: {text}")
    if answer.status in (404, 410):
        return Gone(f"{peer}: {text}")
    if answer.status == 408:
        return SlowLine(f"{peer} did not wait for all of what was sent: {text}")
    if answer.status in (429, 503):
        return Busy(f"{peer} is busy: {text}", _seconds(answer.headers.get("Retry-After")))
    if answer.status >= 500:
        return PeerUnreachable(f"{peer} failed with status {answer.status}: {text}")
    return ProtocolError(f"{peer} refused with status {answer.status}: {text}")


def other_protocol(peer: str, theirs: int) -> OtherProtocol:
    """That `peer` speaks protocol `theirs`, and which side has to be updated."""
    numbers = f"protocol {theirs}, this one speaks {PROTOCOL}"
    if theirs > PROTOCOL:
        return OtherProtocol(f"{peer} runs a newer release of echo-node ({numbers}): update this one")
    return OtherProtocol(f"{peer} runs an older release of echo-node ({numbers}): update that one, or use its release")


def _seconds(header: str | None) -> float:
    try:
        return min(300.0, max(0.1, float(header or "1")))
    except ValueError:
        return 1.0


def _mismatch_line(peer: str, got: bytes) -> str:
    return (
        f"the certificate of {peer} is not the one that was named (it shows {got.hex()[:16]}...): "
        "someone is between, or the node was set up anew; then ask for its new join line"
    )


def _reason(error: Exception) -> str:
    """Why there was no connection, or none for long enough, and what to look at."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "its name does not resolve: is it spelled right, and is this machine on the network?"
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return "it closed the connection without an answer; if it speaks TLS, name it as https://HOST:PORT"
        case OSError(errno=errno.ECONNREFUSED):
            return "nothing listens there (connection refused): is the node running, and is the port right?"
        case OSError(errno=errno.ENETUNREACH | errno.EHOSTUNREACH):
            return "there is no route to it: is the address right, and are both machines on the network?"
    return str(error) or type(error).__name__
