"""A sampler's submissions over a line that is too slow for them, and to a learner that does not take all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from swarm.net.client import PeerClient, binary
from swarm.rollout.messages import Answer, Stepped, StepReply, Submission
from swarm.sampler import handing
from swarm.sampler.client import SUBMIT_PATH, RolloutClient
from swarm.sampler.handing import Handing
from swarm.types import Address
from swarm.wire import ROLLOUT_BODY_BYTES, decode, decompress, encode
from tests.builders import KEY, rollout


class Line:
    """A learner behind a line that carries `carried` rollouts in time, and nothing for the next `stalls` tries."""

    def __init__(self) -> None:
        self.carried = 1000
        self.stalls = 0
        self.tried: list[list[int]] = []
        self.said: list[str] = []
        self.client: RolloutClient
        self.handing: Handing

    async def answer(self, request: web.Request) -> web.Response:
        body = decompress(await request.read(), cap_bytes=ROLLOUT_BODY_BYTES, max_ratio=1e9)
        submission = decode(body, Submission, cap_bytes=ROLLOUT_BODY_BYTES)
        indices = [one.rollout.index for one in submission.answers]
        self.tried.append(indices)
        if self.stalls or len(indices) > self.carried:
            self.stalls = max(0, self.stalls - 1)
            return web.Response(status=408, text="the body came slowly")
        steps = [Stepped(group_id="t0", index=index, turn=0, verdict="accepted", ended=True) for index in indices]
        return binary(encode(StepReply(steps=tuple(steps))))

    def sizes(self) -> list[int]:
        return [len(indices) for indices in self.tried]


@pytest.fixture
async def line(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    line = Line()
    app = web.Application()
    app.add_routes([web.post(SUBMIT_PATH, line.answer)])
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with PeerClient(Address(host="127.0.0.1", port=runner.addresses[0][1])) as peer:
        line.client = RolloutClient(peer, KEY.node_id)
        monkeypatch.setattr(handing, "SLOW_PAUSE_S", 0.0)
        monkeypatch.setattr(handing, "REQUESTS", 1)  # Else two share the line, each in its own order.
        line.handing = Handing(line.client.submit, line.said.append)
        task = asyncio.create_task(line.handing.run())
        yield line
        task.cancel()
        await asyncio.wait([task])
    await runner.cleanup()


def answers(count: int) -> list[Answer]:
    """Rollouts of equal length."""
    return [Answer(rollout(index=index)) for index in range(count)]


async def submitted(line: Line, count: int) -> list[int]:
    return [one.index for one in await line.handing.hand_in_all(answers(count))]


async def test_what_a_slow_line_does_not_carry_is_sent_in_smaller_portions(line: Line) -> None:
    line.carried = 5
    assert await submitted(line, 16) == [*range(16)]
    assert line.sizes() == [16, 8, 4, 4, 4, 4]
    assert len(line.said) == 1
    assert "fewer at once" in line.said[0]


async def test_one_rollout_is_sent_until_it_gets_through(line: Line) -> None:
    line.stalls = 3
    assert await submitted(line, 2) == [0, 1]
    assert line.tried == [[0, 1], [0], [0], [0], [1]]


async def test_portions_stay_small_and_grow_again_with_batches_that_got_through(line: Line) -> None:
    line.stalls = 2
    await submitted(line, 16)
    assert line.sizes() == [16, 8, 4, 4, 4, 4]
    line.tried = []
    await submitted(line, 16)
    assert line.sizes() == [5, 5, 5, 1]
    for _ in range(10):
        line.tried = []
        await submitted(line, 16)
    assert line.sizes() == [16]
