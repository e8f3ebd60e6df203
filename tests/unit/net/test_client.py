"""The little HTTP that every part shares, over a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from swarm.errors import PeerUnreachable, ProtocolError, TooLarge, UserError
from swarm.net import client as client_module
from swarm.net.client import (
    Busy,
    Gone,
    OtherProtocol,
    PeerClient,
    SlowLine,
    binary,
    due_s,
    plain_address,
    read_body,
)
from swarm.net.limits import RateLimits
from swarm.net.server import SHOWN_ROWS, STATUS_S, NodeServer
from swarm.node.exposition import metrics_route
from swarm.types import Address
from swarm.wire import PROTOCOL, PROTOCOL_HEADER
from tests.builders import KEY, OTHER_KEY, SWARM_OF_KEY

CAP = 1000
OURS = {PROTOCOL_HEADER: str(PROTOCOL)}


async def echo(request: web.Request) -> web.Response:
    return binary(await read_body(request, CAP))


async def large(request: web.Request) -> web.StreamResponse:
    """CAP bytes, in parts and without a length."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    for _ in range(10):
        await answer.write(b"x" * (CAP // 10))
    return answer


async def slow(request: web.Request) -> web.Response:
    """Reads a body that has to be there at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "GRACE_S", 0.0)
        return binary(await read_body(request, CAP))


def answering(status: int, **headers: str) -> web.RouteDef:
    async def answer(request: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, text=f"status {status}", headers=named)

    return web.get(f"/{status}", answer)


ROUTES = [
    web.post("/echo", echo),
    web.post("/slow", slow),
    web.get("/large", large),
    *map(answering, (404, 408, 410, 400, 500)),
    answering(302, Location="/large"),
    answering(429, Retry_After="7"),
    answering(503, Retry_After="soon"),
]


@asynccontextmanager
async def serving(
    *routes: web.RouteDef, status: Callable[[], dict[str, Any]] = lambda: {"role": "test"}, **options: Any
) -> AsyncIterator[tuple[str, NodeServer]]:
    """A node's server, with ROUTES if no others are named, and its base URL."""
    server = NodeServer(routes or ROUTES, status, **options)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        await server.stop()


@asynccontextmanager
async def calling(*routes: web.RouteDef) -> AsyncIterator[PeerClient]:
    """A node's client of such a server."""
    async with serving(*routes) as (url, _), PeerClient(plain_address(url)) as peer:
        yield peer


async def status_and_text(
    url: str, headers: dict[str, str], body: bytes | AsyncIterator[bytes] | None = None
) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.request("GET" if body is None else "POST", url, data=body, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("spoken", "says"),
    [
        (str(PROTOCOL - 1), "your node has to be upgraded"),
        (str(PROTOCOL + 1), "this node, the one you called, has to be upgraded"),
        *((spoken, "use the echo-node client") for spoken in (None, "latest", "²", "9" * 5000, "-1", "")),
    ],
    ids=lambda given: given[:9] if given else None,
)
async def test_another_protocol_is_told_which_side_to_upgrade(spoken: str | None, says: str) -> None:
    async with serving() as (url, _):
        status, text = await status_and_text(url + "/large", {} if spoken is None else {PROTOCOL_HEADER: spoken})
    assert (status, says in text, len(text) < 200) == (426, True, True)
    assert "\n" not in text


NODES = 4096


def large_status() -> dict[str, Any]:
    known = {"nickname": "n" * 40, "installed": "0.1", "engine": "vllm", "barred": False, "standby": ""}
    rows = [{"node": f"{number:032x}", **known} for number in range(NODES)]
    return {
        "role": "learner",
        "samplers": rows,
        "links": [(row["node"], row["node"], None, "0.1") for row in rows],
        "cost": {"by_node": {row["node"]: row for row in rows}},
        "broadcasts": {f"0.{version}": {"progress": {row["node"]: 0.5 for row in rows}} for version in range(8)},
        "held_out": [{"version": f"0.{number}"} for number in range(NODES)],
    }


async def test_a_status_is_made_once_a_second_for_all_and_its_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = SimpleNamespace(now=100.0), list[float]()
    monkeypatch.setattr("swarm.net.server.time", SimpleNamespace(monotonic=lambda: clock.now))

    def status() -> dict[str, Any]:
        made.append(clock.now)
        return {**large_status(), "state": "running"}

    async with serving(metrics_route(lambda: server.status()), status=status) as (url, server):
        for _ in range(20):
            text = (await status_and_text(f"{url}/v1/status", {}))[1]
            await status_and_text(f"{url}/metrics", {})
            await status_and_text(url, BROWSER)
        assert made == [100.0]
        clock.now += STATUS_S
        await status_and_text(f"{url}/v1/status", {})
        assert made == [100.0, 100.0 + STATUS_S]
    assert len(text) <= 300_000
    shown = json.loads(text)
    assert shown["cut"] == {
        "samplers": NODES,
        "links": NODES,
        "cost.by_node": NODES,
        **{f"broadcasts.0.{version}.progress": NODES for version in range(8)},
        "held_out": NODES,
    }
    assert [row["version"] for row in shown["held_out"]][-1] == f"0.{NODES - 1}"
    assert {len(shown[name]) for name in ("samplers", "links", "held_out")} == {SHOWN_ROWS}


MALFORMED = [
    b"\x16\x03\x01 garbage\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://[::: HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x:99999999/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    b"GET / HTTP/1.1\r\nbroken\x00: \x01\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
]


async def say_malformed(port: int) -> None:
    """Send each of MALFORMED, twice."""
    for said in MALFORMED:
        # On a connection that spoke HTTP before, aiohttp tells all faults.
        for before in (b"", b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(before + said)
            async with asyncio.timeout(5):
                await reader.read()
            writer.close()


async def test_what_is_not_http_is_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: web.Request) -> web.Response:
        raise ZeroDivisionError

    async with serving(web.get("/fail", fail)) as (url, server):
        await say_malformed(plain_address(url).port)
        assert server.refused() == {"malformed": 2 * len(MALFORMED)}
        assert caplog.records == []
        assert (await status_and_text(f"{url}/fail", OURS))[0] == 500
        assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


async def in_parts(body: bytes) -> AsyncIterator[bytes]:
    """`body` without a Content-Length."""
    for at in range(0, len(body), 100):
        yield body[at : at + 100]


async def test_a_body_over_the_cap_is_refused_with_and_without_its_length_stated() -> None:
    async with serving() as (url, _):
        stated = await status_and_text(url + "/echo", OURS, b"x" * (CAP + 1))
        chunked = await status_and_text(url + "/echo", OURS, in_parts(b"x" * (CAP + 1)))
    assert stated == (413, f"a body of {CAP + 1} bytes is over the cap of {CAP}")
    assert chunked == (413, f"a body is over the cap of {CAP} bytes")


@asynccontextmanager
async def metered(burst: float) -> AsyncIterator[Callable[..., Awaitable[int]]]:
    """A node's server where each address may ask `burst` times, and is given nothing more. Yield a call from an address
    of this machine that returns the answer's status."""
    limits = RateLimits(exempt_loopback=False, requests_per_s=1e-6, burst=burst, fetches_share=1)
    routes = [web.get("/v1/versions/0.1", read_all), web.get("/other", read_all), web.post("/{path:.*}", read_all)]
    async with serving(*routes, limits=limits) as (url, _):

        async def call(source: str, path: str, body: bytes | AsyncIterator[bytes] | None = None) -> int:
            connector = aiohttp.TCPConnector(local_addr=(source, 0))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.request("GET" if body is None else "POST", url + path, data=body, headers=OURS) as answer,
            ):
                return answer.status

        yield call


async def read_all(request: web.Request) -> web.Response:
    return binary(b"" if await read_body(request, 1 << 20) else b"nothing")


async def test_pieces_and_other_requests_of_an_address_are_metered_each_by_themselves() -> None:
    async with metered(burst=3) as call:
        for path in ("/v1/versions/0.1", "/other"):
            assert [await call("127.0.0.2", path) for _ in range(5)] == [200, 200, 200, 429, 429]
        assert await call("127.0.0.3", "/other") == 200


@pytest.mark.parametrize("large", [lambda: b"x" * 100_000, lambda: in_parts(b"x")], ids=["stated", "in parts"])
async def test_large_bodies_and_those_of_unknown_size_are_metered_as_many_requests(
    large: Callable[[], bytes | AsyncIterator[bytes]],
) -> None:
    """With 20 requests, of which each such body counts as 13; rollouts are metered elsewhere."""
    async with metered(burst=20) as call:
        assert [await call("127.0.0.2", "/other", large()) for _ in range(3)] == [200, 429, 429]
        assert [await call("127.0.0.2", "/other", b"x") for _ in range(6)] == [200] * 6
        assert await call("127.0.0.3", "/other", large()) == 200
        assert [await call("127.0.0.4", "/v1/steps", large()) for _ in range(3)] == [200] * 3


async def never() -> AsyncIterator[bytes]:
    """One byte, and then nothing for as long as the connection lasts."""
    yield b"x"
    await asyncio.Event().wait()


async def test_a_sender_that_falls_behind_is_cut_and_its_connection_is_used_no_more() -> None:
    """What is left of its body would be read, and dropped, in front of the next request."""
    async with (
        serving() as (url, server),
        aiohttp.ClientSession() as session,
        session.post(url + "/slow", data=never(), headers=OURS) as answer,
    ):
        assert (answer.status, answer.headers.get("Connection")) == (408, "close")
        assert await answer.text() == "the body came slower than 1000 bytes a second or not within 20 s"
        assert server.refused() == {"too_slow": 1}


@pytest.mark.parametrize(
    ("received", "at_s"), [(0, 2.0), (999, 2.999), (1000, 3.0), (17_999, 19.999), (18_000, 20.0), (8 << 20, 20.0)]
)
def test_a_body_is_due_by_its_rate_and_at_last_by_its_limit(received: int, at_s: float) -> None:
    assert due_s(received) == pytest.approx(at_s)


async def test_a_call_carries_no_header_that_says_nothing() -> None:
    seen: list[str] = []

    async def headers(request: web.Request) -> web.Response:
        seen.extend(request.headers)
        return binary(b"")

    async with calling(web.post("/headers", headers)) as peer, aiohttp.ClientSession() as raw:
        await peer.post("/headers", b"body", cap_bytes=CAP, timeout_s=5)
        async with raw.post(f"{peer.base_url}/headers", headers=OURS) as answer:
            assert set(answer.headers) == {"Content-Length"}
    assert set(seen[:3]) == {"Host", PROTOCOL_HEADER, "Content-Length"}


async def test_a_client_reads_no_more_than_its_cap() -> None:
    async with calling() as peer:
        assert await peer.get("/large", cap_bytes=CAP, timeout_s=5) == b"x" * CAP
        with pytest.raises(TooLarge):
            await peer.get("/large", cap_bytes=CAP - 1, timeout_s=5)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, Gone),
        (410, Gone),
        (400, ProtocolError),
        (302, ProtocolError),
        (408, SlowLine),
        (429, Busy),
        (503, Busy),
        (500, PeerUnreachable),
    ],
)
async def test_the_error_says_whose_fault_it_was(status: int, kind: type[Exception]) -> None:
    async with calling() as peer:
        with pytest.raises(kind, match=f"status {status}") as caught:
            await peer.get(f"/{status}", cap_bytes=CAP, timeout_s=5)
    assert type(caught.value) is kind
    if isinstance(caught.value, Busy):
        assert caught.value.retry_after_s == {429: 7.0, 503: 1.0}[status]


async def test_nobody_listening_or_no_answer_in_time_is_unreachable_not_a_fault() -> None:
    async def called(sock: socket.socket, words: str) -> None:
        async with PeerClient(Address(host="127.0.0.1", port=sock.getsockname()[1])) as peer:
            with pytest.raises(PeerUnreachable, match=words):
                await peer.get("/", cap_bytes=CAP, timeout_s=0.05)

    with socket.socket() as free, socket.create_server(("127.0.0.1", 0)) as deaf:
        free.bind(("127.0.0.1", 0))
        await called(free, "cannot be reached")
        await called(deaf, "did not answer within")


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (PROTOCOL + 1, f"runs a newer release of echo-node .protocol {PROTOCOL + 1}, .* update this one"),
        (PROTOCOL - 1, f"runs an older release of echo-node .protocol {PROTOCOL - 1}, .* update that one"),
    ],
)
async def test_a_client_of_another_protocol_is_told_which_side_to_update(theirs: int, words: str) -> None:
    async def other(request: web.Request) -> web.Response:
        return web.Response(status=426, headers={"Echo-Protocol": str(theirs)})

    async with calling(web.get("/v1/hello", other)) as peer:
        with pytest.raises(OtherProtocol, match=words):
            await peer.get("/v1/hello", cap_bytes=CAP, timeout_s=5)


BROWSER = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("path", "headers"), [("/", {}), ("/", BROWSER), ("/large", BROWSER)], ids=["bare", "browser", "another path"]
)
async def test_a_browser_gets_three_lines(path: str, headers: dict[str, str]) -> None:
    async with (
        serving(status=lambda: {"role": "<b>", "swarm": SWARM_OF_KEY, "join": "echo1:secret"}) as (url, _),
        aiohttp.ClientSession() as session,
        session.get(url + path, headers=headers) as answer,
    ):
        text = await answer.text()
        assert (answer.status, answer.content_type) == (200, "text/html")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert text.count("<p>") == 3
    assert f"This is an echo-node, a &lt;b&gt; of swarm {SWARM_OF_KEY}" in text
    assert f"<code>echo-node status {plain_address(url).authority}</code>" in text
    assert not any(word in text for word in ("secret", "<script", "http:", "src=", "href="))


async def test_what_a_browser_names_is_not_repeated_unless_it_is_an_address() -> None:
    async with serving() as (url, _):
        _, text = await status_and_text(url, {"Host": "<script>"})
    assert "<code>echo-node status HOST:PORT</code>" in text


async def test_a_node_that_names_its_protocol_gets_no_page_and_status_answers_whoever_asks_with_json() -> None:
    async with serving() as (url, _):
        assert (await status_and_text(url, {PROTOCOL_HEADER: str(PROTOCOL), **BROWSER}))[0] == 404
        for headers in ({}, BROWSER):
            answer = await status_and_text(url + "/v1/status", headers)
            assert answer == (200, '{"role": "test", "refused": {}}')


async def test_a_server_that_opens_no_session_holds_nobody_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait for one another while a session is opened; each has its own limit all the same."""
    monkeypatch.setattr("swarm.net.client.SESSION_S", 1e6)

    async def hold(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        serving(web.post("/v1/session", hold)) as (url, _),
        PeerClient(plain_address(url), key=KEY, server=OTHER_KEY.node_id) as peer,
    ):
        calls = [peer.post("/", b"", cap_bytes=CAP, timeout_s=0.05) for _ in range(3)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [PeerUnreachable] * 3


async def test_a_taken_port_is_one_line_that_says_what_to_do() -> None:
    async with serving() as (url, _):
        port = plain_address(url).port
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            await NodeServer([], dict).start("127.0.0.1", port)
