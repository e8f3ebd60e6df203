"""A sampler's submissions over a line that is too slow for them, and to a learner that does not take all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from swarm.errors import ProtocolError
from swarm.net.client import PeerClient, binary
from swarm.rollout.messages import Answer, RolloutVerdict, Submission, SubmissionReply
from swarm.sampler.client import SUBMIT_PATH, RolloutClient
from swarm.types import Address
from swarm.wire import ROLLOUT_BODY_BYTES, decode, decompress, encode
from tests.builders import KEY, rollout


class Line:
    """A learner behind a line that carries `carried` rollouts in time, and nothing for the next `stalls` tries.

    The learner does not take what holds the rollout of index `bad`.
    """

    def __init__(self) -> None:
        self.carried = 1000
        self.stalls = 0
        self.bad = -1
        self.tried: list[list[int]] = []
        self.said: list[str] = []
        self.client: RolloutClient

    async def answer(self, request: web.Request) -> web.Response:
        body = decompress(await request.read(), cap_bytes=ROLLOUT_BODY_BYTES, max_ratio=1e9)
        submission = decode(body, Submission, cap_bytes=ROLLOUT_BODY_BYTES)
        indices = [one.rollout.index for one in submission.answers]
        self.tried.append(indices)
        if self.stalls or len(indices) > self.carried:
            self.stalls = max(0, self.stalls - 1)
            return web.Response(status=408, text="the body came slowly")
        if self.bad in indices:
            return web.Response(status=400, text="not this one")
        verdicts = tuple(RolloutVerdict(rollout_id=str(index), verdict="accepted") for index in indices)
        return binary(encode(SubmissionReply(verdicts=verdicts)))

    def sizes(self) -> list[int]:
        return [len(indices) for indices in self.tried]


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    line = Line()
    app = web.Application()
    app.add_routes([web.post(SUBMIT_PATH, line.answer)])
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with PeerClient(Address(host="127.0.0.1", port=runner.addresses[0][1])) as peer:
        line.client = RolloutClient(peer, KEY.node_id, say=line.said.append, pause_s=0.0)
        yield line
    await runner.cleanup()


def answers(count: int) -> list[Answer]:
    """Rollouts of equal length."""
    return [Answer(rollout(index=index)) for index in range(count)]


async def submitted(line: Line, count: int) -> list[str]:
    return [one.rollout_id for one in await line.client.submit(answers(count))]


async def test_what_a_slow_line_does_not_carry_is_sent_in_smaller_portions(line: Line) -> None:
    line.carried = 5
    assert await submitted(line, 16) == [str(index) for index in range(16)]
    assert line.sizes() == [16, 8, 4, 4, 4, 4]
    assert len(line.said) == 1
    assert "fewer at once" in line.said[0]


async def test_one_rollout_is_sent_until_it_gets_through(line: Line) -> None:
    line.stalls = 3
    assert await submitted(line, 2) == ["0", "1"]
    assert line.tried == [[0, 1], [0], [0], [0], [1]]


async def test_portions_stay_small_and_grow_again_with_batches_that_got_through(line: Line) -> None:
    line.stalls = 2
    await submitted(line, 16)
    assert line.sizes() == [16, 8, 4, 4, 4, 4]
    line.tried = []
    await submitted(line, 16)
    assert line.sizes() == [4, 4, 4, 4]
    for _ in range(10):
        line.tried = []
        await submitted(line, 16)
    assert line.sizes() == [16]


async def test_of_what_the_learner_does_not_take_the_refused_portion_alone_is_lost(line: Line) -> None:
    line.carried, line.bad = 2, 3
    refused: list[tuple[int, str]] = []
    verdicts = await line.client.submit(
        answers(8), on_refused=lambda rollouts, fault: refused.append((rollouts, str(fault).partition(": ")[2]))
    )
    assert [one.rollout_id for one in verdicts] == ["0", "1", "4", "5", "6", "7"]
    assert refused == [(2, '"not this one"')]
    with pytest.raises(ProtocolError, match="not this one"):
        await line.client.submit(answers(8))
