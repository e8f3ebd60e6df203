"""The little HTTP that every part shares: capped bodies, one protocol number, errors that say whose fault it was."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol

import aiohttp
from aiohttp import web

from swarm.errors import PeerUnreachable, ProtocolError, TooLarge, UserError
from swarm.wire import PROTOCOL, PROTOCOL_HEADER

BODY_READ_S = 20.0
"""Time limit for reading one request body, so that a slow sender cannot hold a handler for ever."""

CONNECT_S = 5.0
"""Longest wait for a TCP connection: three SYN retries on a home line."""

MAX_CONNECTIONS = 8
"""Connections that one client opens to one peer: a question held open, a beat, a submission, four chunks, one spare."""

ERROR_TEXT_BYTES = 500
"""How much of a peer's error text is read and shown."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gone(ProtocolError):
    """The peer no longer has (or never had) what was asked for."""


class Busy(PeerUnreachable):
    """The peer asks for patience: 429 or 503. `retry_after_s` is its hint."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Peer(Protocol):
    """Whoever can be asked over HTTP: once (PeerClient), or until it answers (node/link.py)."""

    async def get(self, path: str, *, cap_bytes: int, timeout_s: float) -> bytes: ...

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes: ...


class PeerClient:
    """HTTP to one peer. Every call has a time limit and every body a cap."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._session = aiohttp.ClientSession(
            headers={PROTOCOL_HEADER: str(PROTOCOL)},
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            auto_decompress=False,
        )

    async def __aenter__(self) -> PeerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str, *, cap_bytes: int, timeout_s: float) -> bytes:
        """The body at `path`."""
        return await self._call("GET", path, None, cap_bytes, timeout_s)

    async def post(self, path: str, body: bytes, *, cap_bytes: int, timeout_s: float) -> bytes:
        """The answer to `body`."""
        return await self._call("POST", path, body, cap_bytes, timeout_s)

    async def _call(self, method: str, path: str, body: bytes | None, cap_bytes: int, timeout_s: float) -> bytes:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                method, self.base_url + path, data=body, timeout=limit, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise await _refusal(answer, self.base_url)
                return await read_capped(answer.content, cap_bytes)
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.base_url} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            raise PeerUnreachable(f"{self.base_url} cannot be reached ({_reason(error)})") from error


async def read_capped(stream: aiohttp.StreamReader, cap_bytes: int) -> bytes:
    """Everything from `stream`; TooLarge as soon as more than `cap_bytes` came."""
    parts: list[bytes] = []
    size = 0
    async for part in stream.iter_any():
        size += len(part)
        if size > cap_bytes:
            raise TooLarge(f"a body is over the cap of {cap_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


async def read_body(request: web.Request, cap_bytes: int) -> bytes:
    """A request's body, capped in size and time."""
    if request.content_length is not None and request.content_length > cap_bytes:
        raise TooLarge(f"a body of {request.content_length} bytes is over the cap of {cap_bytes}")
    try:
        async with asyncio.timeout(BODY_READ_S):
            return await read_capped(request.content, cap_bytes)
    except TimeoutError as error:
        raise ProtocolError(f"the body did not arrive within {BODY_READ_S:g} s") from error
    except web.RequestPayloadError as error:
        raise ProtocolError(f"the body is broken: {error}") from error


def binary(body: bytes) -> web.Response:
    """An answer of msgpack or raw bytes."""
    return web.Response(body=body, content_type="application/octet-stream")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse another protocol with 426, and answer a peer's faults with 4xx instead of a stack trace."""
    spoken = request.headers.get(PROTOCOL_HEADER)
    if request.path != "/v1/status" and spoken != str(PROTOCOL):
        return web.Response(status=426, text=_upgrade_line(spoken))
    try:
        return await handler(request)
    except TooLarge as error:
        return web.Response(status=413, text=str(error))
    except ProtocolError as error:
        return web.Response(status=400, text=str(error))


def _upgrade_line(spoken: str | None) -> str:
    if spoken is None or not re.fullmatch(r"[0-9]{1,9}", spoken):
        return f"this is an echo-node that speaks protocol {PROTOCOL}; use the echo-node client"
    side = "this node, the one you called," if int(spoken) > PROTOCOL else "your node"
    return f"protocol {spoken} met protocol {PROTOCOL}: {side} has to be upgraded"


async def _refusal(answer: aiohttp.ClientResponse, peer: str) -> Exception:
    text = (await answer.content.read(ERROR_TEXT_BYTES)).decode(errors="replace").strip()
    if answer.status == 426:
        return UserError(f"{peer} refused: {text}")
    if answer.status in (404, 410):
        return Gone(f"{peer}: {text}")
    if answer.status in (429, 503):
        return Busy(f"{peer} is busy: {text}", _seconds(answer.headers.get("Retry-After")))
    if answer.status >= 500:
        return PeerUnreachable(f"{peer} failed with status {answer.status}: {text}")
    return ProtocolError(f"{peer} refused with status {answer.status}: {text}")


def _seconds(header: str | None) -> float:
    try:
        return min(300.0, max(0.1, float(header or "1")))
    except ValueError:
        return 1.0


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
