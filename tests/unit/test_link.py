"""A sampler's line to a learner that is busy."""

from __future__ import annotations

from types import SimpleNamespace

from aiohttp import web

from swarm.http import PeerClient
from swarm.node.link import LearnerLink
from swarm.types import Address
from tests.builders import KEY


async def test_a_busy_learner_is_asked_again_after_what_it_named_and_counted() -> None:
    """The network is a stand-in: no time passes between two tries, and where the learner is never changes."""
    statuses = [503, 429, 200]

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=statuses.pop(0), headers={"Retry-After": "7"}, body=b"verdicts")

    app = web.Application()
    app.add_routes([web.get("/v1/rollouts", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = Address(host="127.0.0.1", port=runner.addresses[0][1])
    waited: list[float] = []
    busy: list[str] = []
    said: list[str] = []

    async def news(seconds: float) -> None:
        waited.append(seconds)

    async with PeerClient(address) as peer:
        network = SimpleNamespace(
            learner=lambda: (KEY.node_id, [address]),
            peers=SimpleNamespace(at=lambda node, where: peer),
            gossip=SimpleNamespace(news=news),
        )
        link = LearnerLink(network, said.append, on_busy=busy.append)  # type: ignore[arg-type]
        assert await link.get("/v1/rollouts", cap_bytes=100, timeout_s=5.0) == b"verdicts"
    await runner.cleanup()
    assert busy == ["/v1/rollouts"] * 2
    assert waited == [7.0] * 2
    assert said == []
