"""The HTTP that every part shares: capped bodies, one protocol number, errors that say whose fault it was.

Under TLS a client pins the certificate that was named to it. Requests are signed with TLS and without it
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
from swarm.types import Address, NodeId, quoted
from swarm.wire import PROTOCOL, PROTOCOL_HEADER

SESSION_PATH = "/v1/session"
SESSION_S = 10.0  # Time limit for opening a session: two round trips and two signatures
CONNECT_S = 4.0
"""Longest wait for a TCP connection: two SYN retries, after 1 and 3 s. `join` has to say within 5 s what is wrong."""

MAX_CONNECTIONS = 8
"""Connections that one client opens to one peer: a question held open, a beat, a submission, four chunks, one spare."""

MAX_BODY_S = 20.0  # Time limit for a whole body: a sender at just the lowest rate could hold a handler for ever
MIN_BODY_BYTES_PER_S = 1000.0  # A fortieth of a slow uplink; a slower sender means to hold the handler
GRACE_S = 2.0  # How far a sender may fall behind that rate: a lost segment or two on a long line

SILENT = "is the address right, and do firewalls and routers let the port through?"
NUMBER = re.compile("[0-9]{1,9}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ON_SIGNED: web.RequestKey[Callable[[NodeId], None]] = web.RequestKey("on_signed")
"""Set by a server that wants to hear whose request it was as soon as that is proven. It may raise."""


class Gone(ProtocolError):
    """The peer no longer has, or never had, what was asked for."""


class OtherProtocol(ProtocolError):
    """The peer speaks another protocol. The message says which side has to be upgraded."""


class OtherCertificate(PeerUnreachable):
    """The peer shows another certificate than the one that was named."""


class OtherEncryption(PeerUnreachable):
    """The peer does not speak TLS, although TLS was named or expected."""


class Forbidden(ProtocolError):
    """The sender is proven, but what it asks for belongs to another node."""


class TooSlow(ProtocolError):
    """The body comes too slowly. It is refused, so that a sender cannot hold a handler for ever."""


class Crowded(ProtocolError):
    """One node has too many connections or requests."""


class Busy(PeerUnreachable):
    """The peer asks for patience (429 or 503). `retry_after_s` is its hint."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowLine(PeerUnreachable):
    """The peer did not wait for the rest of our body (408). The line is at fault; a smaller body may get through."""


Progress = Callable[[int], None]


class HttpPeer(Protocol):
    """A node that can be asked over HTTP."""

    async def get(self, path: str, *, cap_bytes: int, timeout_s: float, progress: Progress = ...) -> bytes: ...

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes: ...


class PeerClient:
    """HTTP to one peer. Every call has a time limit and every body a cap.

    With `key` and `server` every POST is signed for `server` alone, within a session that the first one opens. An
    address with a fingerprint is called over TLS, and the server has to show the certificate with that fingerprint.
    """

    def __init__(self, address: Address, *, key: SigningKey | None = None, server: NodeId | None = None) -> None:
        if len(address.fingerprint) not in (0, hashlib.sha256().digest_size):
            raise ProtocolError(f"{address.authority} is named with a fingerprint that is no SHA-256")
        self.base_url = address.url
        self._fingerprint = address.fingerprint
        self._signs_for = (key, server) if key is not None and server is not None else None
        self._granted: ClientSession | None = None
        self._opening = asyncio.Lock()
        self._session = aiohttp.ClientSession(
            headers={PROTOCOL_HEADER: str(PROTOCOL)},
            # aiohttp would add these to every request: 130 bytes that tell a node nothing.
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
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
        """Close all connections. Calls under way fail."""
        await self._session.close()

    async def get(
        self, path: str, *, cap_bytes: int, timeout_s: float, progress: Progress = lambda size: None
    ) -> bytes:
        """Return the body at `path`. `progress` gets the size so far."""
        return await self._call("GET", path, None, cap_bytes, timeout_s, progress=progress)

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        """Return the answer to `body`. If the server no longer knows our session, ask it for a new one, once."""
        if self._signs_for is None:
            return await self._call("POST", path, body, cap_bytes, timeout_s)
        try:
            # One limit for everything: a server that is slow to open sessions must not hold callers one after another.
            async with asyncio.timeout(timeout_s):
                granted = await self._session_other_than(None)
                try:
                    return await self._call("POST", path, body, cap_bytes, timeout_s, granted)
                except Unauthorized:
                    granted = await self._session_other_than(granted)
                    return await self._call("POST", path, body, cap_bytes, timeout_s, granted)
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.base_url} did not answer within {timeout_s:g} s") from error

    async def signed_header(self, method: str, path: str, body: bytes) -> str:
        """Return a value of AUTH_HEADER within this client's session, for requests that do not go over HTTP."""
        granted = await self._session_other_than(None)
        return granted.header(method, path, body)

    async def renew_session(self) -> None:
        """Open another session, because the server seems to have forgotten this one."""
        await self._session_other_than(self._granted)

    async def _session_other_than(self, refused: ClientSession | None) -> ClientSession:
        """Return the session in use, or a new one if that is `refused`. Calls that are refused together open one."""
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
        progress: Progress = lambda size: None,
    ) -> bytes:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        headers = {AUTH_HEADER: signer.header(method, path, body or b"")} if signer else {}
        # The path is encoded already, and it is signed, so nothing may quote it again.
        url = URL(self.base_url + path, encoded=True)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise await _refusal(answer, self.base_url)
                return await read_capped(answer.content, cap_bytes, progress=progress)
        except aiohttp.ConnectionTimeoutError as error:
            raise PeerUnreachable(
                f"{self.base_url} cannot be reached: no answer within {CONNECT_S:g} s; {SILENT}"
            ) from error
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.base_url} did not answer within {timeout_s:g} s") from error
        except aiohttp.ServerFingerprintMismatch as error:
            raise OtherCertificate(_mismatch_line(self.base_url, error.got)) from error
        except ssl.SSLError as error:
            why = "it does not speak TLS, as was named; if it was set up again, ask for its new join line"
            raise OtherEncryption(f"{self.base_url} cannot be reached: {why}") from error
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            raise PeerUnreachable(f"{self.base_url} cannot be reached: {_reason(error)}") from error


async def certificate_of(host: str, port: int, timeout_s: float) -> bytes:
    """Return the SHA-256 of the certificate that a TLS server shows, for trust on first use. Raise PeerUnreachable if
    it shows none."""
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=unverified, ssl_shutdown_timeout=1.0)
    except TimeoutError as error:
        raise PeerUnreachable(
            f"{host}:{port} cannot be reached: it did not show a certificate within {timeout_s:g} s; {SILENT}"
        ) from error
    except ssl.SSLError as error:
        raise OtherEncryption(
            f"{host}:{port} does not answer with TLS: it is no echo-node, or one without encryption (--no-tls), named "
            f"as http://{host}:{port}"
        ) from error
    except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError) as error:
        raise PeerUnreachable(
            f"{host}:{port} closed the connection and showed no certificate: it is no echo-node, or too many nodes "
            "call it from this address; is the port right?"
        ) from error
    except (OSError, UnicodeError) as error:
        raise PeerUnreachable(f"{host}:{port} cannot be reached: {_reason(error)}") from error
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    # Not abort: uvloop would drop the end of the handshake, and the server would count it as refused.
    writer.close()
    return hashlib.sha256(certificate).digest()


def plain_address(url: str) -> Address:
    """Return the address in a URL like http://host:7700. Raise UserError for anything else."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise UserError(f"{url!r} is not a URL like http://host:7700")
    return Address(host=parts.hostname, port=parts.port)


async def read_capped(stream: aiohttp.StreamReader, cap_bytes: int, *, progress: Progress = lambda size: None) -> bytes:
    """Read all of `stream`. Raise TooLarge once more than `cap_bytes` came. `progress` gets the size so far."""
    parts: list[bytes] = []
    size = 0
    async for part in stream.iter_any():
        size += len(part)
        if size > cap_bytes:
            raise TooLarge(f"a body is over the cap of {cap_bytes} bytes")
        parts.append(part)
        progress(size)
    return b"".join(parts)


async def read_body(request: web.Request, cap_bytes: int) -> bytes:
    """Read a request's body, capped in size and time. Raise TooSlow once its sender falls behind the lowest rate."""
    if request.content_length is not None and request.content_length > cap_bytes:
        raise TooLarge(f"a body of {request.content_length} bytes is over the cap of {cap_bytes}")
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(began + due_s(0)) as deadline:
            return await read_capped(
                request.content, cap_bytes, progress=lambda size: deadline.reschedule(began + due_s(size))
            )
    except TimeoutError as error:
        raise TooSlow(
            f"the body came slower than {MIN_BODY_BYTES_PER_S:g} bytes a second or not within {MAX_BODY_S:g} s"
        ) from error
    except web.RequestPayloadError as error:
        raise ProtocolError(f"the body is broken: {error}") from error


def due_s(received: int) -> float:
    """Return the seconds from the start of a body until more than `received` bytes have to be there."""
    return min(MAX_BODY_S, GRACE_S + received / MIN_BODY_BYTES_PER_S)


async def read_signed(request: web.Request, cap_bytes: int, sessions: ServerSessions) -> tuple[NodeId, bytes]:
    """Return a request's proven sender and its body. The body is not read if the sender has no session."""
    header = request.headers.get(AUTH_HEADER)
    sessions.check_header(header, now=time.monotonic())
    body = await read_body(request, cap_bytes)
    node = sessions.check(header, request.method, request.raw_path, body, now=time.monotonic())
    if (on_signed := request.get(ON_SIGNED)) is not None:
        on_signed(node)
    return node, body


def session_route(sessions: ServerSessions) -> web.RouteDef:
    """Return the route that answers POST /v1/session."""

    async def answer(request: web.Request) -> web.Response:
        wish = await read_body(request, SESSION_MESSAGE_BYTES)
        return binary(sessions.open(wish, now=time.monotonic(), session_id=secrets.token_bytes(SESSION_ID_BYTES)))

    return web.post(SESSION_PATH, answer)


def binary(body: bytes) -> web.Response:
    """Return an answer of msgpack or raw bytes."""
    return web.Response(body=body, content_type="application/octet-stream")


STATUS_PATH, METRICS_PATH = OPEN_PATHS = "/v1/status", "/metrics"
"""For people and their tools, which do not speak the protocol."""


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse another protocol with 426, and answer a peer's faults with 4xx instead of a stack trace."""
    spoken = request.headers.get(PROTOCOL_HEADER)
    if request.path not in OPEN_PATHS and spoken != str(PROTOCOL):
        return web.Response(status=426, text=_upgrade_line(spoken), headers={PROTOCOL_HEADER: str(PROTOCOL)})
    try:
        return await handler(request)
    except ProtocolError as error:
        status = next((status for kind, status in STATUS_OF_FAULT if isinstance(error, kind)), 400)
        answer = web.Response(status=status, text=str(error), headers={"Retry-After": "1"} if status == 429 else None)
        if status == 408:
            # The rest of the body is still on its way: the next request on this connection would wait behind it.
            answer.force_close()
        return answer


STATUS_OF_FAULT: tuple[tuple[type[ProtocolError], int], ...] = (
    (TooLarge, 413),
    (Unauthorized, 401),
    (Forbidden, 403),
    (TooSlow, 408),
    (Crowded, 429),
)
"""Status codes for a peer's faults. Every other fault is 400."""


def _upgrade_line(spoken: str | None) -> str:
    if spoken is None or not NUMBER.fullmatch(spoken):
        return f"this is an echo-node that speaks protocol {PROTOCOL}; use the echo-node client"
    side = "this node, the one you called," if int(spoken) > PROTOCOL else "your node"
    return f"protocol {spoken} met protocol {PROTOCOL}: {side} has to be upgraded"


async def _refusal(answer: aiohttp.ClientResponse, peer: str) -> Exception:
    text = quoted((await answer.content.read(500)).decode(errors="replace").strip())
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
    """Return an error that says that `peer` speaks protocol `theirs`, and which side has to be updated."""
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
        "someone is between, or the node was set up again; then ask for its new join line"
    )


def _reason(error: Exception) -> str:
    """Say why there was no connection, or not for long enough, and what the user can check."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "its name does not resolve: is it spelled right, and is this machine on the network?"
        case aiohttp.ClientResponseError():
            return "what answers there is no echo-node: is the port the one that `lead` printed?"
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return "it closed the connection: it has just ended, or it speaks TLS (then name it as https://HOST:PORT)"
        case OSError(errno=errno.ECONNREFUSED):
            return "nothing listens there (connection refused): is the node running, and is the port right?"
        case OSError(errno=errno.ENETUNREACH | errno.EHOSTUNREACH):
            return "there is no route to it: is the address right, and are both machines on the network?"
    return str(error) or type(error).__name__
