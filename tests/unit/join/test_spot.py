"""What a machine hears of its cloud: notices of three clouds, and whatever else may answer at that address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from swarm.join import spot
from swarm.join.spot import ANSWER_BYTES, CLOUDS, watch_notices

AWS, GOOGLE, AZURE = (path for path, _ in CLOUDS.values())
Answer = tuple[int, str]
GONE: Answer = (404, "")
EVENTS = '{"DocumentIncarnation": 1, "Events": [{"EventId": "x", "EventType": "%s", "EventStatus": "Scheduled"}]}'


class Metadata:
    """A cloud's service: what it answers at each path, and what it needs to be told for that."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked = asyncio.Event()
        self.rounds = 0
        self.moves, self.followed = False, 0

    async def answer(self, request: web.Request) -> web.Response:
        self.rounds += request.path == "/latest/api/token"
        if request.path == "/elsewhere":
            self.followed += 1
            return web.Response(text="TRUE")
        if self.moves:
            self.asked.set()
            raise web.HTTPFound("/elsewhere")
        if request.path == "/latest/api/token":
            may = request.method == "PUT" and f"{spot.AWS_TOKEN}-ttl-seconds" in request.headers
            return web.Response(text="a token") if may and "aws" in self.answers else web.Response(status=404)
        path, needed = next(one for one in CLOUDS.values() if one[0] == str(request.rel_url))
        needed = needed or {spot.AWS_TOKEN: "a token"}
        if path == AZURE:
            self.asked.set()
        if any(request.headers.get(name) != value for name, value in needed.items()):
            return web.Response(status=401, text='{"action": "terminate"}')
        status, said = self.answers.get(path, GONE)
        return web.Response(status=status, text=said)


@pytest.fixture
async def metadata(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Metadata]:
    service = Metadata()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", service.answer)
    async with TestServer(app) as server:
        monkeypatch.setattr(spot, "METADATA", str(server.make_url("/")).rstrip("/"))
        monkeypatch.setattr(spot, "POLL_S", 0.0)
        yield service


async def heard(service: Metadata, later: dict[str, Answer] | None = None) -> tuple[list[str], list[str]]:
    """Which clouds gave a notice, and what was said, after some rounds with `later` answers in place of the first."""
    notices, said = list[str](), list[str]()
    watching = asyncio.create_task(watch_notices(notices.append, said.append))
    await service.asked.wait()
    assert not notices
    service.answers.update(later or {})
    rounds = service.rounds
    while not watching.done() and service.rounds < rounds + 3:
        service.asked.clear()
        await asyncio.wait({watching, asyncio.create_task(service.asked.wait())}, return_when="FIRST_COMPLETED")
    watching.cancel()
    return notices, said


@pytest.mark.parametrize(
    ("name", "before", "notice"),
    [
        ("AWS", {"aws": GONE}, {AWS: (200, '{"action": "terminate", "time": "2026-11-30T10:00:00Z"}')}),
        ("Google", {GOOGLE: (200, "FALSE")}, {GOOGLE: (200, "TRUE")}),
        ("Azure", {AZURE: (200, EVENTS % "Reboot")}, {AZURE: (200, EVENTS % "Preempt")}),
    ],
)
async def test_each_cloud_is_heard_once_it_gives_a_notice(
    metadata: Metadata, name: str, before: dict[str, Answer], notice: dict[str, Answer]
) -> None:
    metadata.answers = dict(before)
    assert await heard(metadata) == ([], [])
    assert await heard(metadata, notice) == ([name], [])


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_without_a_cloud_a_line_says_so_and_nothing_is_a_notice(metadata: Metadata, status: int) -> None:
    metadata.answers = dict.fromkeys((AWS, GOOGLE, AZURE), (status, '{"action": "terminate"}'))
    notices, said = await heard(metadata)
    assert notices == []
    assert [line.partition(":")[0] for line in said] == ["no cloud gives notices here"]


@pytest.mark.parametrize(
    "said", ["[]", "{}", "null", "TRUE!", '{"Events": 3}', '{"Events": [null]}', "<html>", "x" * (2 * ANSWER_BYTES)]
)
async def test_whatever_else_answers_there_is_no_notice(metadata: Metadata, said: str) -> None:
    metadata.answers = {"aws": GONE, **dict.fromkeys((AWS, GOOGLE, AZURE), (200, said))}
    assert (await heard(metadata))[0] == []


async def test_it_asks_nobody_else(metadata: Metadata) -> None:
    metadata.moves = True
    assert (await heard(metadata))[0] == []
    assert metadata.followed == 0
