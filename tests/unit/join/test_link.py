"""A sampler's line to a learner that is busy, or that it reaches too slowly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from aiohttp import web

from swarm.join.link import LearnerLink
from swarm.net.client import PeerClient, SlowLine
from swarm.sampler.client import SUBMIT_PATH
from swarm.types import Address
from tests.builders import KEY


class Line:
    """A link to a learner that answers with `statuses` in turn.

    The network is a stand-in: no time passes between two tries, and where the learner is never changes.
    """

    def __init__(self, address: Address, peer: PeerClient, statuses: list[int]) -> None:
        self.statuses = statuses
        self.waited: list[float] = []
        self.busy: list[str] = []
        self.said: list[str] = []
        network = SimpleNamespace(
            learner=lambda: (KEY.node_id, [address]),
            peers=SimpleNamespace(at=lambda node, where: peer),
            gossip=SimpleNamespace(news=self._news),
            other_swarm=None,
            misled=0,
        )
        self.link = LearnerLink(network, self.said.append, on_busy=self.busy.append)  # type: ignore[arg-type]

    async def _news(self, seconds: float) -> None:
        self.waited.append(seconds)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    statuses: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=statuses.pop(0), headers={"Retry-After": "7"}, body=b"verdicts")

    app = web.Application()
    app.add_routes([web.post(path, answer) for path in (SUBMIT_PATH, "/v1/beat")])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = Address(host="127.0.0.1", port=runner.addresses[0][1])
    async with PeerClient(address) as peer:
        yield Line(address, peer, statuses)
    await runner.cleanup()


async def test_a_busy_learner_is_asked_again_after_what_it_named_and_counted(line: Line) -> None:
    line.statuses += [503, 429, 200]
    assert await line.link.post(SUBMIT_PATH, b"", cap_bytes=100, timeout_s=5.0) == b"verdicts"
    assert line.busy == [SUBMIT_PATH] * 2
    assert line.waited == [7.0] * 2
    assert line.said == []


async def test_what_came_too_slowly_is_sent_again(line: Line) -> None:
    line.statuses += [408, 200]
    assert await line.link.post("/v1/beat", b"", cap_bytes=100, timeout_s=5.0) == b"verdicts"
    assert len(line.waited) == 1
    assert "trying again" in line.said[0]


async def test_a_submission_that_came_too_slowly_is_left_to_whoever_can_make_it_smaller(line: Line) -> None:
    line.statuses += [408]
    with pytest.raises(SlowLine):
        await line.link.post(SUBMIT_PATH, b"", cap_bytes=100, timeout_s=5.0)
    assert line.waited == []
