"""How often which address may ask the pages that browsers open, with real clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from swarm.dashboard import server
from swarm.dashboard.public import PublicState
from swarm.dashboard.server import Dashboard, for_volunteers
from swarm.net.limits import Meter, RateLimits
from tests.integration.test_dashboard import TOKEN, Led
from tests.unit.net.test_client import say_malformed


@asynccontextmanager
async def volunteers_page() -> AsyncIterator[str]:
    state = PublicState(lambda: {"state": "running"}, {"model": "tiny", "task": "copy"})
    said: list[str] = []
    async with for_volunteers(state, "127.0.0.1:0", said.append):
        yield said[0].removeprefix("page for volunteers ").rstrip("/")


def calling_from(source: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(source, 0)))


async def statuses(session: aiohttp.ClientSession, url: str, times: int = 1, **given: Any) -> list[int]:
    return [(await session.get(url, allow_redirects=False, **given)).status for _ in range(times)]


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address may ask three times. Only 127.0.0.1 is this machine, and refusals come at once."""
    monkeypatch.setattr(server, "LIMITS", RateLimits(burst=3, requests_per_s=1e-6))
    monkeypatch.setattr(server, "REFUSED_S", 0.0)
    monkeypatch.setattr(server, "is_loopback", lambda host: host == "127.0.0.1")


async def test_what_is_not_http_prints_nothing_at_the_page_for_volunteers(caplog: pytest.LogCaptureFixture) -> None:
    async with volunteers_page() as url:
        await say_malformed(URL(url).port or 0)
    assert caplog.records == []


@pytest.mark.usefixtures("metered")
async def test_a_flood_at_the_page_for_volunteers_is_refused_and_others_read_on() -> None:
    async with volunteers_page() as url, calling_from("127.0.0.2") as floods, calling_from("127.0.0.3") as reads:
        assert await statuses(floods, url, 50) == [200] * 3 + [429] * 47
        async with floods.get(f"{url}/public/state.json") as refused:
            assert int(refused.headers["Retry-After"]) > 0
            assert refused.headers["Content-Security-Policy"].startswith("default-src 'self'; ")
        assert await statuses(reads, f"{url}/public/state.json", 3) == [200] * 3
        async with calling_from("127.0.0.1") as proxy:
            assert await statuses(proxy, url, 50) == [200] * 50, "it asks for all of its readers"


@pytest.mark.usefixtures("metered")
async def test_a_connection_gets_one_refusal_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refusal is held back for ever here: no other request on that connection is looked at meanwhile."""
    monkeypatch.setattr(server, "REFUSED_S", 1e9)
    looked = asyncio.Queue[str]()

    class Counted(Meter):
        def take(self, name: str, *, now: float, cost: float = 1.0) -> float:
            looked.put_nowait(name)
            return super().take(name, now=now, cost=cost)

    monkeypatch.setattr(server, "Meter", Counted)
    async with volunteers_page() as url, calling_from("127.0.0.3") as reads:
        _, writer = await asyncio.open_connection("127.0.0.1", URL(url).port, local_addr=("127.0.0.2", 0))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        async with asyncio.timeout(20):
            assert [await looked.get() for _ in range(4)] == ["127.0.0.2"] * 4
        assert await statuses(reads, url, 3) == [200] * 3
        assert [looked.get_nowait() for _ in range(looked.qsize())] == ["127.0.0.3"] * 3
        writer.close()


async def test_a_dozen_people_behind_one_address_open_the_page_for_volunteers_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each with what it loads, and the state each time, all within one moment."""
    monkeypatch.setattr(server, "is_loopback", lambda host: False)
    monkeypatch.setattr(server, "LIMITS", replace(server.LIMITS, requests_per_s=1e-6))
    async with volunteers_page() as url, calling_from("127.0.0.2") as people:

        async def open_page() -> list[int]:
            page = await (await people.get(url)).text()
            script = await (await people.get(f"{url}/public/public.js")).text()
            loaded = [*re.findall(r'(?:src|href)="(public/[^"]+)"', page), *re.findall(r'from "\./(.+)"', script)]
            assert len(loaded) == 5
            paths = [one if one.startswith("public/") else f"public/{one}" for one in (*loaded, "state.json")]
            return [(await people.get(f"{url}/{path}")).status for path in paths]

        assert await asyncio.gather(*(open_page() for _ in range(24))) == [[200] * 6] * 24


@pytest.mark.usefixtures("metered")
async def test_a_flood_without_the_token_does_not_keep_off_the_owner_behind_the_same_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Dashboard(Led(tmp_path).run(), token=TOKEN)
    url = f"http://127.0.0.1:{await page.start('0.0.0.0', 0)}"
    owner = {"headers": {"Cookie": f"echo-node-{URL(url).port}={TOKEN}"}}
    monkeypatch.setattr(server, "STATIC", Path("/nowhere"))
    async with calling_from("127.0.0.2") as caller:
        assert await statuses(caller, f"{url}/api/events", 5) == [401, 401, 401, 429, 429], "and reads no file for it"
        assert await statuses(caller, f"{url}/?token=wrong") == [429]
        assert await statuses(caller, f"{url}/?token={TOKEN}") == [303]
        caller.cookie_jar.clear()
        assert await statuses(caller, f"{url}/api/events", 5, **owner) == [200] * 5
        assert await statuses(caller, f"{url}/api/events") == [429]
    await page.close()
