"""What was drawn goes to the learner together, in smaller portions over a slow line, and comes back as environments
answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm.net.client import SlowLine
from swarm.rollout.messages import Answer, Stepped, Submission
from swarm.sampler import handing
from swarm.sampler.handing import PORTION_BYTES, REQUESTS, Handing
from swarm.wire import ROLLOUT_MAX_RATIO, ROLLOUT_UNPACKED_BYTES, compress, decompress, encode
from tests.builders import rollout
from tests.unit.wires import many_turns


class Learner:
    """Answers the turns of `ready`, once it is let go on. Its line carries `carried` of them in time, and nothing for
    the next `stalls` tries."""

    def __init__(self, *ready: int) -> None:
        self.ready = set(ready)
        self.requests: list[list[int]] = []
        self.goes_on = asyncio.Event()
        self.carried, self.stalls = 1000, 0
        self.said: list[str] = []

    async def submit(self, turns: list[Answer]) -> list[Stepped]:
        self.requests.append([one.rollout.index for one in turns])
        await self.goes_on.wait()
        if self.stalls or len(turns) > self.carried:
            self.stalls = max(0, self.stalls - 1)
            raise SlowLine("the body came slowly")
        return [stepped(one) for one in turns if one.rollout.index in self.ready]


def stepped(answer: Answer) -> Stepped:
    group_id, index = answer.sample
    return Stepped(group_id=group_id, index=index, turn=answer.turn, verdict="accepted", token_ids=b"seen")


@asynccontextmanager
async def running(learner: Learner, *indices: int) -> AsyncIterator[tuple[Handing, list[asyncio.Task[Stepped]]]]:
    """Turns of these samples under way."""
    turns = Handing(learner.submit, learner.said.append)
    task = asyncio.create_task(turns.run())
    asked = [asyncio.create_task(turns.hand_in(Answer(rollout(index=index)))) for index in indices]
    await many_turns()
    try:
        yield turns, asked
    finally:
        for one in (task, *asked):
            one.cancel()
        await asyncio.gather(task, *asked, return_exceptions=True)


async def test_turns_that_are_drawn_together_go_in_one_request() -> None:
    learner = Learner(0, 1, 2)
    async with running(learner, 0, 1, 2) as (_, asked):
        assert learner.requests == [[0, 1, 2]]
        learner.goes_on.set()
        assert [(await one).index for one in asked] == [0, 1, 2]


async def test_what_is_not_answered_is_handed_in_again_and_new_turns_do_not_wait_for_it() -> None:
    learner = Learner(1, 2)
    async with running(learner, 0, 1) as (turns, (slow, quick)):
        later = asyncio.create_task(turns.hand_in(Answer(rollout(index=2))))
        await many_turns()
        assert learner.requests == [[0, 1], [2]]
        learner.goes_on.set()
        assert ((await quick).index, (await later).index, slow.done()) == (1, 2, False)
        learner.ready.add(0)
        assert (await slow).index == 0


async def test_only_a_few_requests_are_under_way() -> None:
    learner = Learner()
    async with running(learner) as (turns, _):
        asked = []
        for index in range(REQUESTS + 2):
            asked.append(asyncio.create_task(turns.hand_in(Answer(rollout(index=index)))))
            await many_turns()
        assert learner.requests == [[index] for index in range(REQUESTS)]
        for one in asked:
            one.cancel()


def learner_on_one_line(monkeypatch: pytest.MonkeyPatch) -> Learner:
    """It answers all at once, one request after the other, so that their order is known."""
    monkeypatch.setattr(handing, "REQUESTS", 1)
    monkeypatch.setattr(handing, "SLOW_PAUSE_S", 0.0)
    learner = Learner(*range(30))
    learner.goes_on.set()
    return learner


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [([1000] * 5, [2, 2, 1]), ([3000, 1, 1], [1, 2]), ([1], [1]), ([9000, 9000], [1, 1]), ([1] * 30, [30])],
)
async def test_a_submission_is_cut_at_its_cap_in_order(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], parts: list[int]
) -> None:
    monkeypatch.setattr(handing, "PORTION_BYTES", 20_000)
    learner = learner_on_one_line(monkeypatch)
    async with running(learner) as (turns, _):
        drawn = [Answer(rollout(index=index, tokens=[3] * count)) for index, count in enumerate(tokens)]
        assert [one.index for one in await turns.hand_in_all(drawn)] == [*range(len(tokens))]
    assert [len(request) for request in learner.requests] == parts
    assert [index for request in learner.requests for index in request] == [*range(len(tokens))]


async def sizes(turns: Handing, learner: Learner, count: int) -> list[int]:
    """Of the requests in which so many answers of equal length get through."""
    learner.requests.clear()
    said = await turns.hand_in_all([Answer(rollout(index=index)) for index in range(count)])
    assert [one.index for one in said] == [*range(count)]
    return [len(request) for request in learner.requests]


@pytest.mark.parametrize(
    ("carried", "stalls", "count", "expected"),
    [(5, 0, 16, [16, 8, 4, 4, 4, 4]), (1000, 3, 2, [2, 1, 1, 1, 1])],
    ids=["smaller portions", "one until it gets through"],
)
async def test_what_a_slow_line_does_not_carry_is_sent_in_smaller_portions_until_it_gets_through(
    monkeypatch: pytest.MonkeyPatch, carried: int, stalls: int, count: int, expected: list[int]
) -> None:
    learner = learner_on_one_line(monkeypatch)
    learner.carried, learner.stalls = carried, stalls
    async with running(learner) as (turns, _):
        assert await sizes(turns, learner, count) == expected
    assert [index for request in learner.requests for index in request][-count:] == [*range(count)]
    assert "fewer at once" in learner.said[0]
    assert len(learner.said) == 1


async def test_portions_stay_small_and_grow_again_with_batches_that_got_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = learner_on_one_line(monkeypatch)
    learner.stalls = 2
    async with running(learner) as (turns, _):
        found = [await sizes(turns, learner, 16) for _ in range(12)]
    assert [found[0], found[1], found[-1]] == [[16, 8, 4, 4, 4, 4], [5, 5, 5, 1], [16]]


def test_rollouts_that_repeat_one_token_are_no_bomb() -> None:
    """A policy that collapsed compresses a hundredfold; its rollouts have to pass all the same."""
    drawn = [Answer(rollout(tokens=[3] * 16_000)) for _ in range(PORTION_BYTES // (9 * 16_000))]
    body = compress(encode(Submission(node="alice", answers=tuple(drawn))))
    unpacked = decompress(body, cap_bytes=ROLLOUT_UNPACKED_BYTES, max_ratio=ROLLOUT_MAX_RATIO)
    assert len(unpacked) > ROLLOUT_MAX_RATIO * len(body)
