"""The page's own HTTP server, beside the node's. Who may open it reads; with the token they change the run.

On loopback reading needs no token, elsewhere everything does. It comes once, as `?token=` in the address that the owner
was told, and is a cookie from then on, also for those who follow a link from elsewhere. A change needs that cookie, and
a header that no other site's page can send. A Host header with a name that is not this machine's is refused: a stranger
may have their name lead to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from swarm.aio import in_thread
from swarm.dashboard.feed import PageFeed
from swarm.dashboard.public import PublicState
from swarm.dashboard.report import STATIC, report_of
from swarm.dashboard.rollouts import read_groups
from swarm.dashboard.source import SOON, ShownRun, Source, encode, kept_timeline, older_events
from swarm.errors import EchoError, UserError
from swarm.net.hosts import address_of, caller_of, is_loopback
from swarm.net.limits import Meter, RateLimits
from swarm.net.server import Connection, quiet_logger
from swarm.run.directory import CONFIG, SUMMARY, TIMELINE, write_json
from swarm.run.log import EVENTS, METRICS
from swarm.run.timeline import Timeline
from swarm.settings import dashboard_address
from swarm.tasks.base import Read

ADDRESS = "dashboard.json"  # In the run directory, for its owner alone: where the page is, and its token
PING_S = 15.0  # Proxies close what is silent for a minute
STALLED_S = 60.0  # A reader that takes nothing for this long is let go; it comes back by itself if it is there
CONNECTIONS = 128  # Open at a time: a browser opens six, and each takes a descriptor that the node may need
LIMITS = RateLimits(burst=240.0)  # Of an address: 34 people open the volunteers' page at once, and 100 leave it open
REFUSED_S = 1.0  # A connection gets one refusal in this time: they would cost almost as much as answers
IDLE_S = 10.0  # A connection that asks for nothing, or never did, is closed after this
CLOSE_S = 0.5  # What readers get at the end to take the last messages
CHANGE_BYTES = 4096  # Of a request to change something, as on the socket

DOWNLOADS = (METRICS, EVENTS, CONFIG, SUMMARY, TIMELINE)
REPORT = "report.html"  # Made when it is asked for

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

PUBLIC = ("public.js", "dom.js", "kept.js", "format.js", "style.css", "icon.svg")  # What public.html loads

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
R = TypeVar("R")

_caller = lru_cache(CONNECTIONS)(caller_of)


class Door:
    """Listens for an app. With CONNECTIONS open, one more takes the place of the oldest without a token, of the address
    with most of these: idle strangers keep out one another, and not the owner. Requests are metered by address, but not
    those that show the token (`is_owner`)."""

    def __init__(self, app: web.Application, is_owner: Callable[[web.Request], bool] = lambda _: False) -> None:
        app.on_response_prepare.append(_harden)
        app.middlewares.insert(0, self._limit)
        self._is_owner = is_owner
        self._meter = Meter(LIMITS)
        log = quiet_logger(Counter())
        waits: dict[str, Any] = {"shutdown_timeout": CLOSE_S, "keepalive_timeout": IDLE_S}
        self._runner = web.AppRunner(app, access_log=None, logger=log, handler_cancellation=True, **waits)
        self._listening: asyncio.Server | None = None
        self._open: dict[web.RequestHandler, bool] = {}  # The oldest first; whether it has shown the token

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raise OSError if that is not possible; it may be tried again."""
        if self._runner.server is None:
            await self._runner.setup()
        self._listening = await asyncio.get_running_loop().create_server(self._enter, host, port)
        return int(self._listening.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    @web.middleware
    async def _limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        remote = request.remote or ""
        if self._is_owner(request):
            if request.protocol in self._open:
                self._open[request.protocol] = True
        # Behind a proxy on this machine all have its address.
        elif not is_loopback(remote) and (wait_s := self._meter.take(_caller(remote), now=time.monotonic())):
            await asyncio.sleep(REFUSED_S)
            text = "too many requests from your address: come back later\n"
            raise web.HTTPTooManyRequests(text=text, headers={"Retry-After": str(math.ceil(wait_s))})
        return await handler(request)

    def _enter(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        while len(self._open) >= CONNECTIONS and self._let_one_go():
            pass
        handler = self._runner.server()
        self._open[handler] = False
        return Connection(handler, self._leave)

    def _leave(self, handler: Any) -> None:
        self._open.pop(handler, None)

    def _let_one_go(self) -> bool:
        """Return False if none can go: those that came within one turn of the loop, 100 at most, have no address yet,
        and the owner's stay."""
        peers = [
            (handler, _caller(peer[0]))
            for handler, is_kept in self._open.items()
            if not is_kept and handler.transport and (peer := handler.transport.get_extra_info("peername"))
        ]
        if not peers:
            return False
        ((crowd, _),) = Counter(caller for _, caller in peers).most_common(1)
        oldest = next(handler for handler, caller in peers if caller == crowd)
        self._leave(oldest)
        assert oldest.transport is not None
        oldest.transport.abort()
        return True


class Dashboard:
    """Serves one run. Without a `token` nothing can be changed."""

    def __init__(self, run: ShownRun, *, token: str | None = None) -> None:
        self._run = run
        self._token = token
        self._form = (STATIC / "token.html").read_text()
        self._feed = PageFeed(secrets.token_hex(4))
        self._source = Source(run, self._feed)
        self._read: Read | None = None
        self._kept: tuple[Timeline, float] | None = None
        # What reads a journal, or a whole run, takes a core: one at a time.
        self._heavy = asyncio.Lock()
        self._is_closing = False
        self._watching: asyncio.Task[None] | None = None
        app = web.Application(middlewares=[self._guard], client_max_size=CHANGE_BYTES)
        app.add_routes(
            [
                web.get("/", self._page),
                web.static("/static/", STATIC),
                web.get("/api/stream", self._stream),
                web.get("/api/timeline", self._timeline),
                web.get("/api/rollouts", self._rollouts),
                web.get("/api/events", self._events),
                web.post("/api/set", self._set),
                web.get("/download/{name}", self._download),
            ]
        )
        app.on_shutdown.append(self._end_streams)
        self._door = Door(app, lambda asked: self._has_token(asked) or self._is_token(asked.query.get("token", "")))

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raise OSError if that is not possible; it may be tried again."""
        port = await self._door.start(host, port)
        self._is_open = is_loopback(host)
        self._names = {host.lower(), "localhost", socket.gethostname().lower()}
        # Cookies know no ports, and two learners of one machine have two tokens.
        self._cookie = f"echo-node-{port}"
        self._watching = asyncio.create_task(self._source.watch())
        return port

    async def close(self) -> None:
        """Tell everybody the last state, and end. Takes twice CLOSE_S at most."""
        await self._door.close()
        if self._watching is not None:
            self._watching.cancel()

    async def _end_streams(self, app: web.Application) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._source.look()
        self._is_closing = True
        self._source.changes.tell()

    # -- who may -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        name = _host_of(request.host)
        if address_of(name) is None and name not in self._names:
            raise web.HTTPForbidden(text="open this page by this machine's address: that name is not known here\n")
        if request.headers.get("Sec-Fetch-Site") == "cross-site" and request.path != "/":
            # It cannot read the answer, but it could take all places, or have reports made.
            raise web.HTTPForbidden(text="another site's page asks for this\n")
        given = request.query.get("token")
        if request.path == "/" and given is not None and self._is_token(given):
            # Away from the address bar, the history, and what a browser tells others.
            answer = web.HTTPSeeOther("/")
            answer.set_cookie(self._cookie, given, httponly=True, samesite="Lax")
            raise answer
        if not self._has_token(request) and not (self._is_open and request.method in ("GET", "HEAD")):
            said = "" if given is None else '<p role="alert"><b>That token is not this run\'s.</b></p>'
            form = self._form.replace("<form", f"{said}<form", 1)
            return web.Response(text=form, content_type="text/html", status=401)
        return await handler(request)

    def _has_token(self, request: web.Request) -> bool:
        return self._is_token(request.cookies.get(self._cookie, ""))

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    # -- what there is -----------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        is_owner = self._has_token(request)
        reader = self._feed.join(request.headers.get("Last-Event-ID", ""), is_owner=is_owner)
        if reader is None:
            raise web.HTTPServiceUnavailable(text="too many pages are open: close one\n", headers={"Retry-After": "30"})
        can_set = self._run.change is not None and is_owner
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        try:
            await answer.prepare(request)
            while True:
                seen, is_last = self._source.changes.count, self._is_closing
                if (messages := self._feed.take(reader)) is None:
                    reader.place, snapshot = await self._source.snapshot()
                    said = self._said(reader.place, "snapshot", b'{"can_set":%b,' % encode(can_set) + snapshot[1:])
                else:
                    said = b"".join(self._said(*message) for message in messages) or b": ping\n\n"
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
            self._feed.readers.discard(reader)

    def _said(self, number: int, event: str, data: bytes) -> bytes:
        return b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (self._feed.boot.encode(), number, event.encode(), data)

    async def _timeline(self, request: web.Request) -> web.Response:
        began, ended = _number(request, "from", 0.0), _number(request, "to", SOON)
        if self._run.timeline is not None:
            timeline, now = self._run.timeline(), time.time()
        else:
            if self._kept is None:
                self._kept = await in_thread(partial(kept_timeline, self._run.directory))
            timeline, now = self._kept
        return _json(timeline.answer(request.query.get("lanes", "").split(","), began, ended, now=now))

    async def _rollouts(self, request: web.Request) -> web.Response:
        before, count = int(_number(request, "before", SOON)), int(_number(request, "count", 20))
        try:
            if self._read is None:
                self._read = await self._alone(self._run.readers)
        except (EchoError, OSError, ImportError) as fault:
            return _json({"groups": [], "next": None, "fault": str(fault)})
        step = int(_number(request, "step", 0))
        work = partial(read_groups, self._run.directory, self._read, before=before, count=count, step=step)
        return _json(await self._alone(work))

    async def _alone(self, work: Callable[[], R]) -> R:
        """Do heavy work in a thread. It goes on if its asker gives up, and holds the lock until it is done."""
        await self._heavy.acquire()
        doing = asyncio.create_task(in_thread(work))
        doing.add_done_callback(self._done)
        return await asyncio.shield(doing)

    def _done(self, work: asyncio.Task[Any]) -> None:
        self._heavy.release()
        if not work.cancelled():
            # Its asker may be gone: read the exception, or asyncio logs that it was never retrieved.
            work.exception()

    async def _events(self, request: web.Request) -> web.Response:
        before, count = int(_number(request, "before", SOON)), int(_number(request, "count", 200))
        return _json(await in_thread(partial(older_events, self._run.directory, before, count)))

    async def _set(self, request: web.Request) -> web.Response:
        if not self._has_token(request):
            raise web.HTTPUnauthorized(text="a change needs the token\n")
        if request.headers.get("X-Echo-Node") != "1":
            raise web.HTTPForbidden(text="a change needs the header X-Echo-Node: 1\n")
        try:
            wanted = json.loads(await request.read())
        except ValueError:
            wanted = None
        if not isinstance(wanted, dict) or self._run.change is None:
            raise web.HTTPBadRequest(text="a change is one JSON object\n")
        try:
            return _json({"done": await self._run.change(wanted)})
        except (EchoError, OSError) as fault:
            return _json({"refused": str(fault)}, status=409)

    async def _download(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        saved = {"Content-Disposition": f'attachment; filename="{name}"'}
        if name == REPORT:
            status = self._run.status() if self._run.status else None
            work = partial(report_of, self._run.directory, self._run.readers, now=time.time(), status=status)
            page, _ = await self._alone(work)
            return web.Response(text=page, content_type="text/html", headers=saved)
        if name not in DOWNLOADS or not (path := self._run.directory / name).is_file():
            raise web.HTTPNotFound(text="this run has no such file, or has not written it yet\n")
        return web.FileResponse(path, headers=saved)


async def _harden(request: web.Request, answer: web.StreamResponse) -> None:
    answer.headers.popall("Server", None)
    for name, value in HEADERS.items():
        answer.headers.setdefault(name, value)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json", status=status)


def _number(request: web.Request, name: str, otherwise: float) -> float:
    """Return a number of the query, at least 0. Raise HTTPBadRequest if it is none."""
    try:
        number = float(request.query.get(name, otherwise))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise web.HTTPBadRequest(text=f"{name} is not a number\n")
    return min(max(0.0, number), SOON)


def _host_of(text: str) -> str:
    try:
        return urlsplit(f"//{text}").hostname or ""
    except ValueError:
        return ""


# -- for whom it is started ------------------------------------------------------------------------------------------


@asynccontextmanager
async def beside(run: ShownRun, address: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Serve the page of a run that this process leads for as long as the block runs, at `address` (HOST:PORT, or
    "off"). Where it cannot be served, say so; the run goes on without."""
    _, token, last = _known(run.directory)
    page = Dashboard(run, token=token or secrets.token_urlsafe(24))
    try:
        url = "" if address == "off" else await _open(page, *dashboard_address(address), last, say)
        with suppress(OSError):
            # On a full disk only the line below has it. A run without a page must not keep an earlier life's address.
            write_json(run.directory / ADDRESS, {"url": url, "token": page._token}, mode=0o600)
        if url:
            say(f"page {url}/?token={page._token}")
        yield
    finally:
        await page.close()


async def serve_files(run: ShownRun, port: int, say: Callable[[str], None]) -> None:
    """Serve a run from its files, on loopback, until this is cancelled. Raise UserError if the port is taken."""
    page = Dashboard(run)
    try:
        say(f"page http://127.0.0.1:{await page.start('127.0.0.1', port)}/")
        await asyncio.Event().wait()
    except OSError as error:
        raise UserError(f"cannot listen on port {port}: {error.strerror or error}: pass another --port") from error
    finally:
        await page.close()


async def _open(page: Dashboard | Door, host: str, port: int, last: int, say: Callable[[str], None]) -> str:
    """Listen where is asked for, else where the run's page was `last`, so that an open page finds it again."""
    try:
        try:
            port = await page.start(host, port or last)
        except OSError:
            if port or not last:
                raise
            say(f"port {last}, where this run's page was, is taken: it moves")
            port = await page.start(host, 0)
    except OSError as error:
        say(f"no page: cannot listen on {host}:{port} ({error.strerror or error}); the run goes on without")
        return ""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def url_of(run_dir: Path) -> str:
    """Return where the page of a run that is led is, with its token; "" if it has none. Blocking."""
    url, token, _ = _known(run_dir)
    return url and f"{url}/?token={token}"


def _known(run_dir: Path) -> tuple[str, str, int]:
    """Return the page's address, token and port as last noted; nothing if the run never had one."""
    try:
        found = json.loads((run_dir / ADDRESS).read_text())
        url, token = str(found["url"]), str(found["token"])
        return url, token, urlsplit(url).port or 0
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", 0


@asynccontextmanager
async def for_volunteers(state: PublicState, address: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Serve the page that anybody may see at `address` (HOST:PORT, or "off") for as long as the block runs. Where it
    cannot be served, say so. A proxy may stand before it: it answers to any name."""

    async def show(request: web.Request) -> web.StreamResponse:
        return web.Response(body=state.body(), content_type="application/json")

    async def file(request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / request.match_info.get("name", "public.html"))

    app, names = web.Application(), "|".join(PUBLIC)
    for path, handler in {"/": file, f"/public/{{name:{names}}}": file, "/public/state.json": show}.items():
        app.router.add_get(path, handler)
    door = Door(app)
    try:
        if address != "off" and (url := await _open(door, *dashboard_address(address), 0, say)):
            say(f"page for volunteers {url}/")
        yield
    finally:
        await door.close()
