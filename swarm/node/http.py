"""The node's HTTP server: routes, `status`, and a clear word when the port is taken."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web

from swarm.errors import UserError
from swarm.http import guard

SHUTDOWN_S = 1.0
"""Open requests get this long when the node stops: held questions would otherwise keep it for their whole wait."""


class NodeServer:
    """One listening socket with the routes of the node's shells."""

    def __init__(self, routes: Iterable[web.RouteDef], status: Callable[[], dict[str, Any]]) -> None:
        self._app = web.Application(middlewares=[guard])
        self._app.add_routes(routes)
        self._app.router.add_get("/v1/status", self._get_status)
        self._status = status
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            # Who has gone does not hear the answer to a question that was held open.
            handler_cancellation=True,
            # Bodies state their own compression; nothing is unpacked before its caps are checked.
            auto_decompress=False,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; the port in use, which differs from `port` only if that is 0."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise _bind_error(error, host, port) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status())


def _bind_error(error: OSError, host: str, port: int) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port} on {host} is in use: stop what listens there or pass another --port")
    if error.errno == errno.EACCES:
        return UserError(f"port {port} needs more rights than you have: pass a --port from 1024 on")
    return UserError(f"cannot listen on {host}:{port}: {error.strerror or error}")
