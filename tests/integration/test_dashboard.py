"""The page's server with real clients: who may ask and change what, and what a stream tells whom."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from swarm.dashboard import server, source
from swarm.dashboard.feed import Reader
from swarm.dashboard.public import PublicState
from swarm.dashboard.server import ADDRESS, Dashboard, beside, for_volunteers, serve_files, url_of
from swarm.dashboard.source import ShownRun
from swarm.errors import UserError
from swarm.run.directory import create_run_directory
from swarm.run.log import RunLog
from swarm.run.timeline import Timeline
from swarm.settings import LeadConfig
from swarm.tasks.base import Read

TOKEN = "a-token"
JSON = {"X-Echo-Node": "1"}


class Led:
    """A run that is led by a stand-in: real files, a status of a few words."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "run"
        create_run_directory(self.directory, LeadConfig(run_dir=self.directory))
        self.log = RunLog(self.directory)
        self.changes: list[dict[str, Any]] = []
        self.looked = 0
        self.is_up = True

    def step(self, number: int, **figures: float) -> None:
        self.log.metrics({"step": number, "time": 1000.0 + number, "reward": number / 10, **figures})

    def run(self) -> ShownRun:
        def status() -> dict[str, Any] | None:
            self.looked += 1
            return {"state": "running", "step": self.log.last.get("step", 0)} if self.is_up else None

        async def change(request: dict[str, Any]) -> str:
            if "max_staleness" not in request:
                raise UserError("only max-staleness can be set")
            self.changes.append(request)
            return "max-staleness is 4"

        return ShownRun(
            directory=self.directory,
            readers=no_readers,
            status=status,
            change=change,
            timeline=lambda: Timeline(0.0),
        )


def no_readers() -> Read:
    raise UserError("the run never came to its first step")


Serve = Callable[..., Awaitable[str]]


@pytest.fixture
def led(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Led:
    monkeypatch.setattr(source, "LOOK_S", 0.01)
    monkeypatch.setattr(source, "LOOK_SHARE", 1.0)
    return Led(tmp_path)


@pytest.fixture
async def serve(led: Led) -> AsyncIterator[Serve]:
    pages: list[Dashboard] = []

    async def started(host: str = "127.0.0.1", token: str | None = TOKEN, run: ShownRun | None = None) -> str:
        page = Dashboard(run or led.run(), token=token)
        pages.append(page)
        return f"http://127.0.0.1:{await page.start(host, 0)}"

    yield started
    for page in pages:
        await page.close()


@pytest.fixture
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


class Stream:
    """What a stream says, event by event."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.last_id = ""

    async def next(self) -> tuple[str, Any]:
        fields: dict[str, str] = {}
        async with asyncio.timeout(20):
            while True:
                if not (read := await self._answer.content.readuntil(b"\n")):
                    raise EOFError
                line = read.decode().rstrip("\n")
                if not line and fields:
                    self.last_id = fields["id"]
                    return fields["event"], json.loads(fields["data"])
                name, _, value = line.partition(": ")
                if name:
                    fields[name] = value

    async def rest(self) -> set[str]:
        """The events up to the end."""
        heard = set()
        while True:
            try:
                heard.add((await self.next())[0])
            except EOFError:
                return heard

    async def until(self, kind: str) -> Any:
        """The next event of a kind; digests come every moment."""
        while True:
            event, data = await self.next()
            if event == kind:
                return data
            assert event == "digest"


async def opened(browser: aiohttp.ClientSession, url: str, last_id: str = "") -> Stream:
    answer = await browser.get(
        f"{url}/api/stream", headers={"Last-Event-ID": last_id} if last_id else {}, read_bufsize=1 << 20
    )
    assert (answer.status, answer.content_type) == (200, "text/event-stream")
    return Stream(answer)


async def test_a_stream_begins_with_everything_and_goes_on_with_what_is_new(
    led: Led, serve: Serve, browser: aiohttp.ClientSession
) -> None:
    led.step(1, entropy=2.0)
    led.log.event("evaluated", version=0, exact_match=0.25)
    led.log.event("checkpoint", step=1)
    url = await serve()
    stream = await opened(browser, url)
    event, snapshot = await stream.next()
    assert event == "snapshot"
    assert (snapshot["live"], snapshot["can_set"], snapshot["name"]) == (True, False, "run")
    assert (snapshot["digest"]["state"], snapshot["digest"]["step"]) == ("running", 1)
    assert snapshot["columns"]["entropy"] == {"x": [1.0], "mean": [2.0], "low": [2.0], "high": [2.0]}
    assert snapshot["evaluated"]["exact_match"]["x"] == [0.0]
    assert snapshot["times"]["mean"] == [1001.0]
    assert snapshot["marks"] == [{"step": 1.0, "kind": "checkpoint", "text": "checkpoint"}]
    assert snapshot["bounds"] == [[0, 2]]
    assert [event["kind"] for event in snapshot["events"]] == ["evaluated", "checkpoint"]
    assert snapshot["event_counts"] == {"evaluated": 1, "checkpoint": 1}
    older = await (await browser.get(f"{url}/api/events?before={snapshot['events'][1]['byte']}&count=3")).json()
    assert ([event["kind"] for event in older["events"]], older["next"]) == (["evaluated"], None)
    led.step(2)
    assert await stream.until("steps") == [{"step": 2, "time": 1002.0, "reward": 0.2}]
    led.log.event("checkpoint", step=2)
    assert [event["step"] for event in await stream.until("events")] == [2]
    assert (await stream.until("digest"))["step"] == 2


async def test_a_reader_that_comes_back_is_told_what_it_missed_and_nothing_twice(
    led: Led, serve: Serve, browser: aiohttp.ClientSession
) -> None:
    url = await serve()
    stays, leaves = await opened(browser, url), await opened(browser, url)
    await stays.next()
    await leaves.next()
    led.step(1)
    await leaves.until("steps")
    leaves._answer.close()
    led.step(2)
    await stays.until("steps")
    await stays.until("steps")
    again = await opened(browser, url, leaves.last_id)
    assert [line["step"] for line in await again.until("steps")] == [2]
    event, snapshot = await (await opened(browser, url, "other-3")).next()
    assert (event, snapshot["columns"]["reward"]["x"]) == ("snapshot", [1.0, 2.0])


async def test_nothing_is_reckoned_while_nobody_looks(
    led: Led, browser: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With 0 it would also forget while somebody reads, before this test can see it.
    monkeypatch.setattr(source, "FORGET_S", 0.05)
    led.log.event("checkpoint", step=0)
    page = Dashboard(led.run(), token=TOKEN)
    url = f"http://127.0.0.1:{await page.start('127.0.0.1', 0)}"
    await page._source.look()
    assert led.looked == 0
    stream = await opened(browser, url)
    await stream.next()
    assert led.looked > 0
    forget, forgotten = page._feed.forget, asyncio.Event()

    def and_tell() -> None:
        forget()
        forgotten.set()

    monkeypatch.setattr(page._feed, "forget", and_tell)
    stream._answer.close()
    await asyncio.wait_for(forgotten.wait(), 20)
    seen = led.looked
    await page._source.look()
    assert led.looked == seen
    led.step(1)
    event, snapshot = await (await opened(browser, url, stream.last_id)).next()
    assert (event, snapshot["columns"]["reward"]["x"]) == ("snapshot", [1.0])
    assert [event["kind"] for event in snapshot["events"]] == ["checkpoint"], "once, however often it is read"
    await page.close()


@pytest.mark.parametrize("addresses", [1, 40], ids=["of the owner's address", "of many"])
async def test_idle_strangers_do_not_keep_the_owner_off_the_page(serve: Serve, addresses: int) -> None:
    """They take all places, and take a new one for each that they lose. The owner asks again and again on connections
    of its own, and on one that it holds for good."""
    url, connected = URL(await serve("0.0.0.0")), asyncio.Semaphore(0)

    async def idle(number: int) -> None:
        source = f"127.0.0.{1 if addresses == 1 else 2 + number % addresses}"
        while True:
            connection = await asyncio.open_connection("127.0.0.1", url.port, local_addr=(source, 0))
            connected.release()
            await read(connection)
            connection[1].close()

    def browser() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(cookies={f"echo-node-{url.port}": TOKEN})

    async with asyncio.TaskGroup() as group, browser() as stays:
        strangers = [group.create_task(idle(number)) for number in range(160)]
        for _ in strangers:
            await connected.acquire()
        for _ in range(30):
            async with browser() as comes, comes.get(url / "api/events") as answer:
                assert answer.status == 200
            async with stays.get(url / "static/style.css") as answer:
                assert answer.status == 200
        for one in strangers:
            one.cancel()


async def test_strangers_of_one_address_take_the_place_of_one_another(
    led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 4)
    page = Dashboard(led.run(), token=TOKEN)
    port = await page.start("0.0.0.0", 0)

    async def connect(source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))

    honest = await connect("127.0.0.2")
    greedy = [await connect("127.0.0.3") for _ in range(3)]
    greedy.append(await connect("127.0.0.3"))
    assert await asyncio.wait_for(read(greedy.pop(0)), 20) == b""
    honest[1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: echo-node-%d=a-token\r\n\r\n" % port)
    assert b" 200 " in await honest[0].readline()
    for _ in range(3):
        greedy.append(await connect("127.0.0.3"))
        assert await asyncio.wait_for(read(greedy.pop(0)), 20) == b""
    other = await connect("127.0.0.4")
    assert await asyncio.wait_for(read(greedy.pop(0)), 20) == b""
    assert not any(reader.at_eof() for reader, _ in (honest, other, *greedy))
    for _, writer in (honest, other, *greedy):
        writer.close()
    await page.close()


async def read(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """What comes until the other end closes the connection, even rudely."""
    try:
        return await connection[0].read()
    except ConnectionResetError:
        return b""


async def test_who_connects_and_asks_for_nothing_is_let_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", int((await serve()).rpartition(":")[2]))
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_a_page_that_takes_nothing_is_let_go(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    left = asyncio.Event()

    class Readers(set[Reader]):
        def discard(self, reader: object) -> None:
            super().discard(reader)
            left.set()

    monkeypatch.setattr(server, "STALLED_S", 0.1)
    for _ in range(20):
        led.log.event("noise", text="x" * 900_000)  # More than the buffers of two sockets
    page = Dashboard(led.run(), token=TOKEN)
    page._feed.readers = Readers()
    with socket.create_connection(("127.0.0.1", await page.start("127.0.0.1", 0))) as deaf:
        deaf.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(left.wait(), 20)
    await page.close()


async def test_a_taken_port_of_a_kept_run_is_one_line(led: Led) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on port {port}: .*: pass another --port"):
            await serve_files(ShownRun(directory=led.directory, readers=no_readers), port, print)


async def test_heavy_work_that_nobody_waits_for_any_more_keeps_its_turn(led: Led) -> None:
    page, begun, go_on = Dashboard(led.run()), threading.Semaphore(0), threading.Event()

    def work() -> None:
        begun.release()
        go_on.wait(20)

    askers = [asyncio.create_task(page._alone(work)) for _ in range(5)]
    assert await asyncio.to_thread(begun.acquire, timeout=20)
    for asker in askers:
        asker.cancel()
    await asyncio.gather(*askers, return_exceptions=True)
    assert page._heavy.locked(), "the thread goes on"
    assert not begun.acquire(blocking=False), "and nobody else's began"
    go_on.set()
    await page._alone(work)
    assert begun.acquire(blocking=False)


async def test_before_the_node_is_up_its_page_says_that_it_starts(
    led: Led, serve: Serve, browser: aiohttp.ClientSession
) -> None:
    led.is_up = False
    _, snapshot = await (await opened(browser, await serve())).next()
    assert snapshot["digest"]["state"] == "starting"


async def test_a_run_that_was_killed_is_shown_as_its_files_have_it(
    led: Led, serve: Serve, browser: aiohttp.ClientSession
) -> None:
    led.step(7)
    led.log.event("evaluated", version=5, exact_match=0.25)
    with (led.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    timeline = Timeline(1000.0)
    timeline.note("learner", "train", 1001.0, 1002.0)
    (led.directory / "timeline.json").write_text(json.dumps(timeline.kept(now=1003.0)))
    url = await serve(token=None, run=ShownRun(directory=led.directory, readers=no_readers))
    _, snapshot = await (await opened(browser, f"{url}")).next()
    shown = snapshot["digest"]
    assert (snapshot["live"], shown["state"], shown["step"]) == (False, "going on, or killed", 7)
    assert {tile["id"]: tile["value"] for tile in shown["tiles"] if tile["value"]} == {"reward": 0.7, "held_out": 0.25}
    lanes = await (await browser.get(f"{url}/api/timeline?lanes=learner")).json()
    assert "learner" in lanes["buckets"]["lanes"]
    for token in ("", "None"):
        assert (await browser.get(f"{url}/?token={token}")).status == 200
        async with browser.post(f"{url}/api/set", json={"max_staleness": 4}, headers=JSON) as answer:
            assert answer.status == 401
    rollouts = await (await browser.get(f"{url}/api/rollouts")).json()
    assert rollouts == {"groups": [], "next": None, "fault": "the run never came to its first step"}


async def test_a_stream_without_news_is_kept_open_by_comments(
    led: Led, serve: Serve, browser: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PING_S", 0.01)
    stream = await opened(browser, await serve(run=ShownRun(directory=led.directory, readers=no_readers)))
    await stream.next()
    for _ in range(3):
        assert await stream._answer.content.readuntil(b"\n\n") == b": ping\n\n"


async def test_a_page_of_another_site_gets_nothing(serve: Serve, browser: aiohttp.ClientSession) -> None:
    url = await serve()
    for path, status in (("/", 200), ("/api/stream", 403), ("/download/report.html", 403)):
        assert (await browser.get(url + path, headers={"Sec-Fetch-Site": "cross-site"})).status == status


async def test_a_change_needs_the_token_as_a_cookie_and_a_header_of_the_page(
    led: Led, serve: Serve, browser: aiohttp.ClientSession
) -> None:
    url = await serve()

    async def change(wanted: object, **headers: str) -> tuple[int, str]:
        async with browser.post(f"{url}/api/set", json=wanted, headers=headers) as answer:
            return answer.status, await answer.text()

    wanted = {"max_staleness": 4}
    assert (await change(wanted, **JSON))[0] == 401
    reader, writer = await asyncio.open_connection("127.0.0.1", port := int(url.rpartition(":")[2]))
    writer.write(b"POST /api/set HTTP/1.0\r\nHost: localhost\r\nCookie: echo-node-%d=\xff\xfe\r\n\r\n" % port)
    assert b" 401 " in await reader.readline()
    writer.close()
    assert (await browser.get(f"{url}/?token=wrong")).status == 200
    assert (await change(wanted, **JSON))[0] == 401
    async with browser.get(f"{url}/?token={TOKEN}", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith(f"echo-node-{url.rpartition(':')[2]}={TOKEN}; ")
        assert {"HttpOnly", "SameSite=Lax"} <= set(cookie.split("; "))
    assert (await change(wanted))[0] == 403
    assert led.changes == []
    assert await change(wanted, **JSON) == (200, '{"done":"max-staleness is 4"}')
    assert await change({"steps": 1}, **JSON) == (409, '{"refused":"only max-staleness can be set"}')
    assert (await change([1], **JSON))[0] == 400
    assert (await change({"x": "y" * 5000}, **JSON))[0] == 413
    assert led.changes == [wanted]
    _, snapshot = await (await opened(browser, url)).next()
    assert snapshot["can_set"]


async def test_a_page_that_others_can_reach_tells_nothing_without_the_token(
    serve: Serve, browser: aiohttp.ClientSession
) -> None:
    url = await serve("0.0.0.0")
    paths = ("/", "/api/stream", "/api/events", "/static/style.css", "/download/config.json", "/?token=x", "/nowhere")
    for path in paths:
        async with browser.get(url + path) as answer:
            assert answer.status == 401, path
            assert "run directory" in await answer.text()
    async with browser.get(f"{url}/?token={TOKEN}") as answer:
        assert answer.status == 200
    for path in ("/", "/api/events", "/static/style.css", "/download/config.json"):
        assert (await browser.get(url + path)).status == 200, path


async def test_a_name_that_somebody_else_gave_this_machine_is_refused(
    serve: Serve, browser: aiohttp.ClientSession
) -> None:
    url = await serve()
    for name, status in (
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("[", 403),
        ("localhost:1", 200),
        ("[::1]:1", 200),
        ("10.1.2.3", 200),
        (socket.gethostname(), 200),
    ):
        assert (await browser.get(f"{url}/api/events", headers={"Host": name})).status == status, name


async def test_every_answer_forbids_what_the_page_does_not_need(serve: Serve, browser: aiohttp.ClientSession) -> None:
    url = await serve()
    for path in ("/", "/api/events", "/api/stream", "/static/app.js", "/download/metrics.jsonl", "/nowhere"):
        async with browser.get(url + path) as answer:
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'; "), path
            assert "unsafe" not in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert "Server" not in answer.headers
            assert "Access-Control-Allow-Origin" not in answer.headers


async def test_only_named_files_of_a_run_can_be_fetched(led: Led, serve: Serve, browser: aiohttp.ClientSession) -> None:
    led.step(1)
    (led.directory / ADDRESS).write_text("secret")
    (led.directory.parent / "other").mkdir()
    (led.directory.parent / "other" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    url = await serve()

    async def fetch(path: str) -> tuple[int, str]:
        async with browser.get(URL(url + path, encoded=True)) as answer:
            return answer.status, await answer.text()

    assert (await fetch("/download/metrics.jsonl"))[1].startswith('{"step": 1')
    assert '"task":"copy"' in (await fetch("/download/report.html"))[1]
    outside = (ADDRESS, "..%2fother%2fmetrics.jsonl", "journal.db", "identity", "summary.json", "%00")
    for name in outside:
        assert (await fetch(f"/download/{name}"))[0] == 404, name
    assert (await fetch("/static/../server.py"))[0] == 404
    assert (await fetch("/static/..%2fserver.py"))[0] == 404
    assert (await fetch("/api/rollouts?count=0"))[0] == 200
    assert (await fetch("/api/events?before=x"))[0] == 400
    assert (await fetch("/api/timeline?from=nan"))[0] == 400


async def test_a_look_that_fails_is_told_and_the_next_one_goes_on(
    led: Led, serve: Serve, browser: aiohttp.ClientSession
) -> None:
    run, faults = led.run(), [RuntimeError("a status nobody expected"), OSError("a disk that is away")]
    assert run.status is not None
    status, healthy = run.status, asyncio.Event()

    def breaks() -> Mapping[str, Any] | None:
        if healthy.is_set() and faults:
            raise faults.pop(0)
        return status()

    stream = await opened(browser, await serve(run=replace(run, status=breaks)))
    await stream.next()
    healthy.set()
    while not (fault := (await stream.until("digest"))["fault"]):
        pass
    assert fault == "the page cannot show what is new: RuntimeError('a status nobody expected'); please report it"
    led.step(1)
    assert [line["step"] for line in await stream.until("steps")] == [1]
    assert (await stream.until("digest"))["fault"] == ""


async def test_at_the_end_everybody_hears_the_last_state_and_the_server_is_gone(
    led: Led, browser: aiohttp.ClientSession
) -> None:
    page = Dashboard(led.run(), token=TOKEN)
    url = f"http://127.0.0.1:{await page.start('127.0.0.1', 0)}"
    streams = [await opened(browser, url) for _ in range(3)]
    for stream in streams:
        await stream.next()
    led.step(1)
    led.log.event("stopped", state="finished")
    await page.close()
    for stream in streams:
        assert {"steps", "events", "digest"} <= await stream.rest()


async def test_a_run_that_goes_on_has_its_page_where_it_was(led: Led) -> None:
    said: list[str] = []
    async with beside(led.run(), "127.0.0.1:0", said.append):
        first = json.loads((led.directory / ADDRESS).read_text())
        assert stat.S_IMODE(os.stat(led.directory / ADDRESS).st_mode) == 0o600
        assert said == [f"page {first['url']}/?token={first['token']}"]
    async with beside(led.run(), "127.0.0.1:0", said.append):
        assert json.loads((led.directory / ADDRESS).read_text()) == first
    port = int(first["url"].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        said.clear()
        async with beside(led.run(), "127.0.0.1:0", said.append):
            moved = json.loads((led.directory / ADDRESS).read_text())
            assert moved["token"] == first["token"]
            assert moved["url"] != first["url"]
            assert said[0] == f"port {port}, where this run's page was, is taken: it moves"
        said.clear()
        async with beside(led.run(), f"127.0.0.1:{port}", said.append):
            assert len(said) == 1
            assert said[0].startswith(f"no page: cannot listen on 127.0.0.1:{port} (")
            assert said[0].endswith("address already in use); the run goes on without")
            assert url_of(led.directory) == "", "nobody is sent to the page of a life before"
    async with beside(led.run(), "off", said.append):
        assert json.loads((led.directory / ADDRESS).read_text()) == {"url": "", "token": first["token"]}


async def test_anybody_gets_the_page_for_volunteers_by_any_name_and_nothing_else(
    led: Led, browser: aiohttp.ClientSession
) -> None:
    state = PublicState(lambda: {"state": "running", "step": 3, "steps": 9}, {"model": "tiny", "task": "copy"})
    said: list[str] = []
    async with for_volunteers(state, "127.0.0.1:0", said.append):
        url = said[0].removeprefix("page for volunteers ").rstrip("/")
        # As a proxy with a name and a certificate of its own passes it on.
        async with browser.get(url, headers={"Host": "run.example.org", "X-Forwarded-Proto": "https"}) as answer:
            assert "public/public.js" in await answer.text()
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'; ")
            assert "Server" not in answer.headers
        for path in ("/public/public.js", "/public/style.css", "/public/icon.svg"):
            assert (await browser.get(url + path)).status == 200, path
        assert (await (await browser.get(f"{url}/public/state.json")).json())["step"] == 3
        for path in ("/public/../server.py", "/public/..%2fserver.py", "/public/", "/static/app.js", "/api/events"):
            assert (await browser.get(URL(url + path, encoded=True))).status == 404, path
        assert (await browser.post(url)).status == 405
        async with for_volunteers(state, url.removeprefix("http://"), said.append):
            assert said[1].startswith("no page: cannot listen on 127.0.0.1:")
    async with for_volunteers(state, "off", said.append):
        assert len(said) == 2
