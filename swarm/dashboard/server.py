"""The page's own HTTP server, beside the node's. Who may open it reads; with the token they change the run.

On loopback reading needs no token, elsewhere everything does. It comes once, as `?token=` in the address that the owner
was told, and is a cookie from then on. A change needs that cookie, and a header that no other site's page can send. A
Host header with a name that is not this machine's is refused: a stranger may have their name lead to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from swarm.dashboard.feed import Feed
from swarm.dashboard.rollouts import read_groups
from swarm.dashboard.source import Run, Source, encode, older_events
from swarm.errors import EchoError, UserError
from swarm.net.hosts import address_of, is_loopback
from swarm.node.metrics import EVENTS, METRICS
from swarm.node.rundir import CONFIG, SUMMARY
from swarm.process import in_thread
from swarm.report.figures import read_figures
from swarm.report.page import render
from swarm.report.samples import Read, read_journal
from swarm.settings import dashboard_address

STATIC = Path(__file__).parent / "static"
ADDRESS = "dashboard.json"  # In the run directory, for its owner alone: where the page is, and its token
PING_S = 15.0  # Proxies close what is silent for a minute
STALLED_S = 60.0  # A reader that takes nothing for this long is let go; it comes back by itself if it is there
CLOSE_S = 0.5  # What readers get at the end to take the last messages
CHANGE_BYTES = 4096  # Of a request to change something, as on the socket
EVENTS_MOST = 1000  # In one answer

DOWNLOADS = (METRICS, EVENTS, CONFIG, SUMMARY, "timeline.json")
REPORT = "report.html"

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>echo-node</title>
</head><body><main><h1>echo-node</h1><p>This page needs the token of its run. It is in the line <code>page</code> that
the learner printed, and in dashboard.json in the run directory.</p>
<form action="/" method="get"><label>Token <input name="token" type="password" autocomplete="off" required></label>
<button>Open</button></form></main></body></html>
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """Serves one run. Without a `token` nobody can change anything."""

    def __init__(self, run: Run, *, token: str | None = None) -> None:
        self._run = run
        self._token = token
        self._feed = Feed(secrets.token_hex(4))
        self._source = Source(run, self._feed)
        self._read: Read | None = None
        # Reading a journal or a whole run takes a core: one at a time.
        self._heavy = asyncio.Lock()
        self._is_closing = False
        self._watching: asyncio.Task[None] | None = None
        app = web.Application(middlewares=[self._guard], client_max_size=CHANGE_BYTES)
        app.router.add_get("/", self._page)
        app.router.add_get("/api/stream", self._stream)
        app.router.add_get("/api/rollouts", self._rollouts)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/timeline", self._timeline)
        app.router.add_post("/api/set", self._set)
        app.router.add_get("/download/{name}", self._download)
        app.router.add_static("/static/", STATIC)
        app.on_response_prepare.append(_harden)
        app.on_shutdown.append(self._end_streams)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S, handler_cancellation=True)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raise OSError if that is not possible."""
        self._host = host
        self._is_open = is_loopback(host)
        if self._runner.server is None:
            await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self._port = int(self._runner.addresses[0][1])
        self._watching = asyncio.create_task(self._source.watch())
        return self._port

    async def close(self) -> None:
        """Tell everybody the last state, and end. Takes CLOSE_S at most."""
        if self._watching is not None:
            self._watching.cancel()
        await self._runner.cleanup()

    async def _end_streams(self, app: web.Application) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._source.look()
        except TimeoutError:
            pass
        self._is_closing = True
        self._source.changes.tell()

    # -- who may -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._is_named(request.host):
            raise web.HTTPForbidden(text="open this page by this machine's address: this name is not known here\n")
        given = request.query.get("token")
        if request.path == "/" and given is not None and self._is_token(given):
            # Away from the address bar, the history and what the browser tells others.
            answer = web.HTTPSeeOther("/")
            answer.set_cookie(self._cookie, given, httponly=True, samesite="Strict", path="/")
            raise answer
        reads = request.method in ("GET", "HEAD")
        if not (self._is_open and reads) and not self._has_token(request):
            return web.Response(status=401, text=FORM, content_type="text/html")
        return await handler(request)

    def _is_named(self, host: str) -> bool:
        name = urlsplit(f"//{host}").hostname or ""
        return address_of(name) is not None or name in ("localhost", self._host.lower(), socket.gethostname().lower())

    @property
    def _cookie(self) -> str:
        # Cookies know no ports, and two learners of one machine have two tokens.
        return f"echo-node-{self._port}"

    def _has_token(self, request: web.Request) -> bool:
        return self._is_token(request.cookies.get(self._cookie, ""))

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())

    # -- what there is -----------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        reader = self._feed.join(request.headers.get("Last-Event-ID", ""))
        if reader is None:
            raise web.HTTPServiceUnavailable(text="too many pages are open: close one\n", headers={"Retry-After": "30"})
        can_set = self._run.change is not None and self._has_token(request)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        try:
            await answer.prepare(request)
            while True:
                seen, is_last = self._source.changes.count, self._is_closing
                if (messages := self._feed.take(reader)) is None:
                    number, snapshot = await self._source.snapshot()
                    self._feed.given(reader, number)
                    said = self._said(number, "snapshot", b'{"can_set":%b,' % encode(can_set) + snapshot[1:])
                else:
                    said = b"".join(self._said(one.number, one.event, one.data) for one in messages) or b": ping\n\n"
                async with asyncio.timeout(STALLED_S):
                    await answer.write(said)
                if is_last:
                    return answer
                await self._source.changes.wait(seen, PING_S)
        except TimeoutError:
            assert request.transport is not None
            request.transport.abort()
            return answer
        finally:
            self._feed.leave(reader)

    def _said(self, number: int, event: str, data: bytes) -> bytes:
        return b"id: %b\nevent: %b\ndata: %b\n\n" % (self._feed.id_of(number).encode(), event.encode(), data)

    async def _rollouts(self, request: web.Request) -> web.Response:
        before, count = _whole(request, "before", 2**62), _whole(request, "count", 20)
        async with self._heavy:
            try:
                if self._read is None:
                    self._read = await in_thread(self._run.readers)
            except (EchoError, OSError) as fault:
                return _json({"groups": [], "next": None, "fault": str(fault)})
            work = partial(read_groups, self._run.directory, self._read, before=before, count=count)
            return _json(await in_thread(work))

    async def _events(self, request: web.Request) -> web.Response:
        before, count = _whole(request, "before", 2**62), min(EVENTS_MOST, _whole(request, "count", 200))
        events, place = await in_thread(partial(older_events, self._run.directory, before, count))
        return _json({"events": events, "next": place})

    async def _timeline(self, request: web.Request) -> web.Response:
        return _json({"now": 0, "began": 0, "recent_s": 600, "states": [], "all": [], "spans": {}})

    async def _set(self, request: web.Request) -> web.Response:
        if not self._has_token(request):
            raise web.HTTPUnauthorized(text="a change needs the token\n")
        if request.headers.get("X-Echo-Node") != "1":
            raise web.HTTPForbidden(text="a change needs the header X-Echo-Node: 1\n")
        try:
            wanted = json.loads(await request.read())
        except ValueError:
            wanted = None
        if not isinstance(wanted, dict):
            raise web.HTTPBadRequest(text="a change is one JSON object\n")
        if self._run.change is None:
            return _json({"refused": "this run is not led now"}, status=409)
        try:
            return _json({"done": await self._run.change(wanted)})
        except (EchoError, OSError) as fault:
            return _json({"refused": str(fault)}, status=409)

    async def _download(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        saved = {"Content-Disposition": f'attachment; filename="{name}"'}
        if name == REPORT:
            async with self._heavy:
                page = await in_thread(partial(_report, self._run))
            return web.Response(text=page, content_type="text/html", headers=saved)
        if name not in DOWNLOADS or not (path := self._run.directory / name).is_file():
            raise web.HTTPNotFound(text=f"this run has no {name} yet\n" if name in DOWNLOADS else "not found\n")
        return web.FileResponse(path, headers=saved)


def _report(run: Run) -> str:
    return render(read_figures(run.directory), read_journal(run.directory, run.readers), now=time.time())


async def _harden(request: web.Request, answer: web.StreamResponse) -> None:
    answer.headers.popall("Server", None)
    for name, value in HEADERS.items():
        answer.headers.setdefault(name, value)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json", status=status)


def _whole(request: web.Request, name: str, otherwise: int) -> int:
    """Return a whole number of the query. Raise HTTPBadRequest if it is none."""
    text = request.query.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise web.HTTPBadRequest(text=f"{name} is a whole number\n")
    return min(int(text), 2**62)


async def serve_files(run: Run, port: int, say: Callable[[str], None]) -> None:
    """Serve a run from its files, on loopback, until this is cancelled. Raise UserError if the port is taken."""
    page = Dashboard(run)
    try:
        port = await page.start("127.0.0.1", port)
        say(f"page http://127.0.0.1:{port}/")
        await asyncio.Event().wait()
    except OSError as error:
        raise UserError(f"cannot listen on port {port}: {error.strerror or error}: pass another --port") from error
    finally:
        await page.close()


@asynccontextmanager
async def beside(run: Run, address: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Serve the page of a run that this process leads for as long as the block runs, at `address` (HOST:PORT). Where it
    cannot be served, say so, and have the run go on without."""
    before = known_address(run.directory)
    page = Dashboard(run, token=before.get("token") or secrets.token_urlsafe(24))
    host, port = dashboard_address(address)
    url = await _open(page, host, port, _port_of(before.get("url", "")), say)
    if url is not None:
        _note(run.directory, {"url": url, "token": page._token})
        say(f"page {url}/?token={page._token}")
    try:
        yield
    finally:
        await page.close()


async def _open(page: Dashboard, host: str, port: int, last: int, say: Callable[[str], None]) -> str | None:
    try:
        try:
            port = await page.start(host, port or last)
        except OSError:
            if port or not last:
                raise
            say(f"port {last} of this run's page is taken: the page moves")
            port = await page.start(host, 0)
    except OSError as error:
        say(f"no page: cannot listen on {host}:{port}: {error.strerror or error}; the run goes on without")
        return None
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def known_address(run_dir: Path) -> dict[str, str]:
    """Return url and token of the run's page, as last noted; nothing if it never had one. Blocking."""
    try:
        found = json.loads((run_dir / ADDRESS).read_text())
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _port_of(url: str) -> int:
    try:
        return urlsplit(url).port or 0
    except ValueError:
        return 0


def _note(run_dir: Path, values: dict[str, Any]) -> None:
    path = run_dir / ADDRESS
    partial_file = path.with_name(path.name + ".partial")
    partial_file.unlink(missing_ok=True)
    os.close(os.open(partial_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    partial_file.write_text(json.dumps(values) + "\n")
    partial_file.replace(path)
