"""The node's HTTP server: routes, `status`, TLS, limits for each caller, and a clear error when the port is taken.

A connection is counted when it is accepted, before TLS, because a flood would cost us most in handshakes. So this
module accepts connections and hands those that it lets in to the event loop and aiohttp.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from swarm.errors import UserError
from swarm.net.client import ON_SIGNED, OPEN_PATHS, STATUS_PATH, Crowded, Handler, guard
from swarm.net.limits import Gate, Guest, RateLimits
from swarm.net.stream import PREAMBLE, Incoming, receive_exactly, start_tls, tune, wait_for
from swarm.types import NodeId
from swarm.wire import PROTOCOL_HEADER

SHUTDOWN_S = 1.0
"""Open requests get this long when the node stops. Held questions would otherwise keep it for their whole wait."""

HANDSHAKE_S = 10.0  # Time limit for a first byte and a TLS handshake; the connection is counted already
ACCEPT_PAUSE_S = 1.0  # Pause after a connection could not be accepted; without it the loop would spin

KEEPALIVE_S = 75.0
"""An idle connection, or one that never sends its whole request line, is closed after this. Our clients keep theirs for
less (15 s), so that a request never meets a connection that is just being closed."""

LINGER_S = 2.0  # How long the rest of a refused body is read and dropped, so that its sender hears the refusal

FETCHED_PATHS = ("/v1/versions/", "/v1/objects/")  # Pieces of weights, of which a newcomer needs thousands

STATUS_S = 1.0  # A status is made once in this time, however many ask: with 4,096 nodes that takes 40 ms of the loop
SHOWN_ROWS = 128
"""Entries of a list in a status that strangers see, half of them its first and half its last: 250 kB with 4,096 nodes.
The dashboard shows all."""

ROLLOUTS_PATH = "/v1/steps"
REFUSED_AS = {
    400: "malformed",
    408: "too_slow",
    413: "too_large",
    426: "other_protocol",
}
"""Answers that are counted by status. 401, 403 and 429 are counted in more detail where they are decided."""

CROWDED = b"too many connections from your address: close some, or come back later\n"
CROWDED_ANSWER = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    % (len(CROWDED), CROWDED)
)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>echo-node</title></head><body>
<p>This is an echo-node, {said}: machines that train a language model together.</p>
<p>Nodes speak with one another here; there is nothing to click.</p>
<p>To see how it goes: <code>echo-node status {named}</code></p>
</body></html>
"""
"""What a browser gets. It is static, and loads nothing."""

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class NodeServer:
    """One listening port with the routes of the node's shells. `counted` are further counters of refusals for `status`,
    such as ServerSessions.refused."""

    def __init__(
        self,
        routes: Iterable[web.RouteDef],
        status: Callable[[], dict[str, Any]],
        *,
        tls: ssl.SSLContext | None = None,
        limits: RateLimits | None = None,
        counted: Sequence[Counter[str]] = (),
        on_stream: Callable[[Incoming], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._app = web.Application(middlewares=[self._limit, guard])
        self._app.add_routes(routes)
        self._app.router.add_get(STATUS_PATH, self._get_status)
        self._app.on_response_prepare.append(_drop_needless_headers)
        self._status = status
        self._tls = tls
        self._on_stream = on_stream
        self._gate = Gate(limits or RateLimits())
        self._refused: Counter[str] = Counter()
        self._counted = (self._refused, self._gate.refused, *counted)
        self._made: dict[str, Any] = {}
        self._made_json = b""
        self._made_until = -math.inf
        self._guests: dict[asyncio.BaseProtocol, Guest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[socket.socket] = []
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            logger=quiet_logger(self._refused),
            shutdown_timeout=SHUTDOWN_S,
            # A client that has gone does not hear the answer to a question that was held open.
            handler_cancellation=True,
            # Bodies state their own compression. Nothing is unpacked before its caps are checked.
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port in use. It differs from `port` only if that is 0."""
        await self._runner.setup()
        try:
            await self._listen(host, port)
        except OSError as error:
            await self.stop()
            raise _bind_error(error, host, port) from error
        return int(self._listening[0].getsockname()[1])

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._listening:
            listening.close()
        await self._runner.cleanup()

    def refused(self) -> dict[str, int]:
        """Return how many connections and requests were refused, by reason."""
        return dict(sum(self._counted, Counter[str]()))

    def status(self) -> dict[str, Any]:
        """Return what the node says of itself, and whom it refused. All who ask within STATUS_S get the same object."""
        if time.monotonic() >= self._made_until:
            self._made, self._made_json = {**self._status(), "refused": self.refused()}, b""
            self._made_until = time.monotonic() + STATUS_S
        return self._made

    # -- connections -----------------------------------------------------------------------------------------

    async def _listen(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            # More connections may wait than arrive in one turn of a busy loop.
            listening = socket.create_server(address, family=family, backlog=128)
            listening.setblocking(False)
            self._listening.append(listening)
            self._start(self._accept(listening))

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, address = await loop.sock_accept(listening)
            except OSError:
                # Most likely there are no descriptors left. Callers in the backlog get in when others have left.
                self._refused["not_accepted"] += 1
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if (guest := self._gate.enter(address[0])) is None:
                self._turn_away(connected)
            else:
                self._start(self._serve(connected, guest))

    async def _serve(self, connected: socket.socket, guest: Guest) -> None:
        """Hand a stream to its taker, and any other connection, after TLS, to aiohttp, which then owns it."""
        assert self._runner.server is not None
        if await self._is_stream(connected, guest):
            return
        handler = self._runner.server()
        self._guests[handler] = guest
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(handler, self._leave),
                connected,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
                # Nothing is lost if the peer does not agree to the end of TLS.
                ssl_shutdown_timeout=2.0 if self._tls else None,
            )
        except BaseException as error:
            self._leave(handler)
            if not isinstance(error, OSError):
                raise
            # A port scan, one that went away, or one that took too long. Our own clients try plain HTTP first where a
            # node of this machine is named without its scheme.
            self._refused["plain_http" if getattr(error, "reason", "") == "HTTP_REQUEST" else "handshake"] += 1

    async def _is_stream(self, connected: socket.socket, guest: Guest) -> bool:
        """Return True if the connection needs nothing more: it was a stream (net/stream.py), or it has ended."""
        taken = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                connected.setblocking(False)
                await wait_for(connected, writable=False)
                if self._on_stream is None or connected.recv(1, socket.MSG_PEEK) != PREAMBLE[:1]:
                    return False
                if await receive_exactly(connected, len(PREAMBLE)) != PREAMBLE:
                    raise ConnectionResetError("neither HTTP nor a stream")
                tune(connected)
                if self._tls is not None:
                    connected = await start_tls(connected, self._tls, server_side=True)
            taken = True
            prove = lambda node: self._prove(guest, node)  # noqa: E731
            await self._on_stream(Incoming(connected, prove, lambda: self._gate.leave(guest)))
        except (OSError, TimeoutError):
            self._refused["handshake"] += 1
            connected.close()
            self._gate.leave(guest)
        except asyncio.CancelledError:
            if not taken:
                connected.close()
                self._gate.leave(guest)
            raise
        return True

    def _leave(self, handler: asyncio.Protocol) -> None:
        if (guest := self._guests.pop(handler, None)) is not None:
            self._gate.leave(guest)

    def _turn_away(self, connected: socket.socket) -> None:
        """Say why, but not over TLS: the cap is there to save the handshake."""
        with connected, suppress(OSError):
            if self._tls is None:
                connected.send(CROWDED_ANSWER)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- requests --------------------------------------------------------------------------------------------

    @web.middleware
    async def _limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if (guest := self._guests.get(request.protocol)) is not None:
            fetches = request.path.startswith(FETCHED_PATHS)
            # A body in pieces does not say how large it is. Rollouts have limits of their own (rollout/intake.py).
            size = math.inf if request.content_length is None and request.can_read_body else request.content_length or 0
            size = 0 if request.path == ROLLOUTS_PATH else size
            wait_s = self._gate.wait_s(guest, now=time.monotonic(), fetches=fetches, body_bytes=size)
            if wait_s > 0.0:
                text = "too many requests from your address: come back later"
                return web.Response(status=429, text=text, headers={"Retry-After": str(math.ceil(wait_s))})
            request[ON_SIGNED] = lambda node: self._prove(guest, node)
        if _is_browser(request):
            return _page(request, self.status())
        answer = await handler(request)
        if (reason := REFUSED_AS.get(answer.status)) is not None:
            self._refused[reason] += 1
        return answer

    def _prove(self, guest: Guest, node: NodeId) -> None:
        if not self._gate.prove(guest, node):
            raise Crowded(f"node {node} has too many connections open: close some")

    async def _get_status(self, request: web.Request) -> web.Response:
        status = self.status()
        if not self._made_json:
            whole: dict[str, int] = {}
            shown = _shortened(status, "", whole)
            self._made_json = json.dumps({**shown, "cut": whole} if whole else shown).encode()
        return web.Response(body=self._made_json, content_type="application/json", charset="utf-8")


def quiet_logger(refused: Counter[str]) -> logging.Logger:
    """Return a logger for aiohttp that tells faults of our own. Requests that are not HTTP are counted in `refused`: a
    traceback for each would fill a disk."""

    def is_own_fault(record: logging.LogRecord) -> bool:
        if record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError):
            refused["malformed"] += 1
            return False
        return record.levelno >= logging.WARNING

    logger = logging.Logger(__name__, logging.DEBUG)  # aiohttp tells some of them at that level
    logger.parent = logging.getLogger(__name__)
    logger.addFilter(is_own_fault)
    return logger


class Connection(asyncio.Protocol):
    """aiohttp's protocol for one connection, which also tells the server when the connection ends."""

    def __init__(self, handler: asyncio.Protocol, on_lost: Callable[[asyncio.Protocol], None]) -> None:
        self._handler = handler
        self._on_lost = on_lost
        self.connection_made = handler.connection_made  # type: ignore[method-assign]
        self.data_received = handler.data_received  # type: ignore[method-assign]
        self.eof_received = handler.eof_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._handler)
        self._handler.connection_lost(exc)


def _shortened(value: Any, place: str, whole: dict[str, int]) -> Any:
    """Return a status with SHOWN_ROWS entries of each list and mapping. `whole` gets how many there were, by place."""
    if not isinstance(value, dict | list | tuple):
        return value
    rows = list(value.items() if isinstance(value, dict) else enumerate(value))
    if len(rows) > SHOWN_ROWS:
        whole[place] = len(rows)
        rows = rows[: SHOWN_ROWS // 2] + rows[-SHOWN_ROWS // 2 :]
    shown = {key: _shortened(one, f"{place}.{key}".lstrip("."), whole) for key, one in rows}
    return shown if isinstance(value, dict) else list(shown.values())


def _is_browser(request: web.Request) -> bool:
    """Return True if a person looks at this port: no node asks without the protocol's header, or for a page."""
    asks_for_page = request.path == "/" or "text/html" in request.headers.get("Accept", "")
    speaks = PROTOCOL_HEADER in request.headers or request.path in OPEN_PATHS
    return request.method in ("GET", "HEAD") and asks_for_page and not speaks


def _page(request: web.Request, status: Mapping[str, Any]) -> web.Response:
    """Say what this is, whose it is, and how to see more, but nothing that `status` does not show."""
    swarm = status.get("swarm")
    said = escape(f"a {status.get('role', 'node')} of {f'swarm {swarm}' if swarm else 'a swarm that it looks for'}")
    # As the browser named it: a node behind a router does not know its own address. No other header is shown.
    named = request.host if re.fullmatch(r"[A-Za-z0-9.:\[\]-]{1,255}", request.host) else "HOST:PORT"
    text = PAGE.format(said=said, named=escape(named))
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=PAGE_HEADERS)


async def _drop_needless_headers(request: web.Request, answer: web.StreamResponse) -> None:
    """Drop what aiohttp adds to every answer: 110 bytes that tell a node nothing and a stranger our versions."""
    for name in ("Server", "Date"):
        answer.headers.popall(name, None)
    if answer.headers.get("Content-Type") == "application/octet-stream":
        del answer.headers["Content-Type"]


async def check_port(host: str, port: int) -> None:
    """Raise UserError if a server could not listen there now."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, address in dict.fromkeys(found):
            # Bound but not listening: callers are refused meanwhile.
            with socket.socket(family) as bound:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(address)
    except OSError as error:
        raise _bind_error(error, host, port) from error


def _bind_error(error: OSError, host: str, port: int) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port} on {host} is in use: stop what listens there or pass another --port")
    if error.errno == errno.EACCES:
        return UserError(f"port {port} needs more rights than you have: pass a --port from 1024 on")
    return UserError(f"cannot listen on {host}:{port}: {error.strerror or error}")
