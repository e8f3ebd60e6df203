"""The node's HTTP server: routes, `status`, TLS, limits for each caller, and a clear word when the port is taken.

A connection is counted from its first packet on, before TLS: handshakes are what a flood would spend us on. Therefore
the listening socket is plain, and TLS is started on a connection once it has been let in.
"""

from __future__ import annotations

import asyncio
import errno
import math
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from aiohttp import web

from swarm.errors import UserError
from swarm.http import ON_SIGNED, Crowded, Handler, guard
from swarm.node.limits import Gate, Guest, Limits
from swarm.types import NodeId

SHUTDOWN_S = 1.0
"""Open requests get this long when the node stops: held questions would otherwise keep it for their whole wait."""

HANDSHAKE_S = 10.0
"""Time limit of a TLS handshake, within which its connection is counted already."""

KEEPALIVE_S = 75.0
"""An idle connection, or one that never sends its whole request line, is closed after this: longer than our clients
keep theirs (15 s), so that a request never meets a connection that is just being closed."""

LINGER_S = 2.0
"""How long the rest of a refused body is read and dropped, so that its sender hears the refusal."""

UNMETERED_PATHS = ("/v1/versions/", "/v1/objects/")
"""Chunks and objects are fetched as fast as the line allows; the cap on connections bounds them."""

REFUSED_AS = {
    400: "malformed",
    403: "forbidden",
    408: "too_slow",
    413: "too_large",
    426: "other_protocol",
}
"""Answers that are counted by status. 401 and 429 are counted with more detail where they are decided."""

CROWDED = b"too many connections from your address: close some, or come back later\n"
CROWDED_ANSWER = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    % (len(CROWDED), CROWDED)
)


class NodeServer:
    """One listening socket with the routes of the node's shells.

    `counted` are further counters of refusals for `status`, such as ServerSessions.refused.
    """

    def __init__(
        self,
        routes: Iterable[web.RouteDef],
        status: Callable[[], dict[str, Any]],
        *,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        counted: Sequence[Counter[str]] = (),
    ) -> None:
        self._app = web.Application(middlewares=[self._limit, guard])
        self._app.add_routes(routes)
        self._app.router.add_get("/v1/status", self._get_status)
        self._app.on_response_prepare.append(_drop_needless_headers)
        self._status = status
        self._tls = tls
        self._gate = Gate(limits or Limits())
        self._refused: Counter[str] = Counter()
        self._counted = (self._refused, self._gate.refused, *counted)
        self._guests: dict[asyncio.BaseProtocol, Guest] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            # Who has gone does not hear the answer to a question that was held open.
            handler_cancellation=True,
            # Bodies state their own compression; nothing is unpacked before its caps are checked.
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; the port in use, which differs from `port` only if that is 0."""
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: Connection(self), host, port, backlog=128
            )
        except OSError as error:
            await self._runner.cleanup()
            raise _bind_error(error, host, port) from error
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for handshake in self._handshakes:
            handshake.cancel()
        await self._runner.cleanup()

    def refused(self) -> dict[str, int]:
        """How many connections and requests were refused, by reason."""
        return dict(sum(self._counted, Counter[str]()))

    # -- connections, called by Connection -------------------------------------------------------------------

    def enter(self, transport: asyncio.Transport) -> asyncio.Protocol | None:
        """The protocol that serves a new connection; None if it was one too many and is closed."""
        peer = transport.get_extra_info("peername")
        guest = self._gate.enter(peer[0] if peer else "")
        if guest is None or self._runner.server is None:
            self._turn_away(transport)
            return None
        handler = self._runner.server()
        self._guests[handler] = guest
        return handler

    def leave(self, handler: asyncio.Protocol) -> None:
        if (guest := self._guests.pop(handler, None)) is not None:
            self._gate.leave(guest)

    def secure(self, connection: Connection, transport: asyncio.Transport) -> bool:
        """Start TLS where there is any; the connection hears through `secured`, or through `connection_lost`."""
        if self._tls is None:
            return False
        transport.pause_reading()
        task = asyncio.get_running_loop().create_task(self._shake_hands(self._tls, connection, transport))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        return True

    async def _shake_hands(self, tls: ssl.SSLContext, connection: Connection, transport: asyncio.Transport) -> None:
        secured: asyncio.Transport | None = None
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, connection, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:
            # A port scan, a client without TLS, one that went away, or one that took too long.
            self._refused["handshake"] += 1
        finally:
            if secured is None:
                transport.abort()
                connection.connection_lost(None)
        if secured is not None:
            connection.secured(secured)

    def _turn_away(self, transport: asyncio.Transport) -> None:
        """Say why where that costs nothing: a handshake for it would be what the cap is to save."""
        if self._tls is None:
            transport.write(CROWDED_ANSWER)
            transport.close()
        else:
            transport.abort()

    # -- requests --------------------------------------------------------------------------------------------

    @web.middleware
    async def _limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guest = self._guests.get(request.protocol)
        if guest is not None:
            wait_s = 0.0 if request.path.startswith(UNMETERED_PATHS) else self._gate.wait_s(guest, now=time.monotonic())
            if wait_s > 0.0:
                return _too_many_requests(wait_s)
            request[ON_SIGNED] = lambda node: self._prove(guest, node)
        answer = await handler(request)
        if (reason := REFUSED_AS.get(answer.status)) is not None:
            self._refused[reason] += 1
        return answer

    def _prove(self, guest: Guest, node: NodeId) -> None:
        if not self._gate.prove(guest, node):
            raise Crowded(f"node {node} has too many connections open: close some")

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.json_response({**self._status(), "refused": self.refused()})


class Connection(asyncio.Protocol):
    """One connection: counted, secured if the server has TLS, then passed on to aiohttp's own protocol."""

    def __init__(self, server: NodeServer) -> None:
        self._server = server
        self._handler: asyncio.Protocol | None = None
        self._begun = False
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        self._handler = self._server.enter(plain)
        if self._handler is not None and not self._server.secure(self, plain):
            self.secured(plain)

    def secured(self, transport: asyncio.Transport) -> None:
        """Requests may come. Some have, if they were in the same packet as the end of the handshake."""
        if self._handler is None:
            transport.abort()
            return
        self._begun = True
        self._handler.connection_made(transport)
        early, self._early = self._early, []
        for data in early:
            self._handler.data_received(data)

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            if self._handler is not None:
                self._early.append(data)
        elif self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._begun and self._handler is not None else None

    def pause_writing(self) -> None:
        if self._begun and self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._begun and self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called once or, after a handshake that failed, twice."""
        handler, self._handler = self._handler, None
        if handler is not None:
            self._server.leave(handler)
            if self._begun:
                handler.connection_lost(exc)


async def _drop_needless_headers(request: web.Request, answer: web.StreamResponse) -> None:
    """What aiohttp adds to every answer: 110 bytes that tell a node nothing and a stranger our versions."""
    for name in ("Server", "Date"):
        answer.headers.popall(name, None)
    if answer.headers.get("Content-Type") == "application/octet-stream":
        del answer.headers["Content-Type"]


def _too_many_requests(wait_s: float) -> web.Response:
    return web.Response(
        status=429,
        text="too many requests from your address: come back later",
        headers={"Retry-After": str(math.ceil(wait_s))},
    )


def _bind_error(error: OSError, host: str, port: int) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port} on {host} is in use: stop what listens there or pass another --port")
    if error.errno == errno.EACCES:
        return UserError(f"port {port} needs more rights than you have: pass a --port from 1024 on")
    return UserError(f"cannot listen on {host}:{port}: {error.strerror or error}")
