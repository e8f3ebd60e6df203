"""What a feed asks for, begins and hands on, with an engine whose samples end when the test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from swarm.errors import ChildFailed
from swarm.rollout.client import Answer, SealedLease
from swarm.sampler.feeding import Room, SampleFeed
from swarm.types import SampleSpec
from tests.builders import lease, rollout
from tests.unit.wires import many_turns

PLACES = 8
AHEAD = 2


class Gated:
    """Stands for an engine's worker: a sample ends when it is released, or breaks with what it is released with."""

    places = PLACES

    def __init__(self) -> None:
        self.drawing: dict[int, asyncio.Future[None]] = {}

    async def draw(self, sealed: SealedLease, spec: SampleSpec) -> Answer:
        gate = self.drawing[spec.index] = asyncio.get_running_loop().create_future()
        await gate
        return Answer(lease=sealed, rollouts=(rollout(group_id=sealed.lease.group_id, index=spec.index),))

    async def end(self, *indices: int) -> None:
        for index in indices:
            self.drawing[index].set_result(None)
        await many_turns()


def leased(count: int) -> list[SealedLease]:
    return [SealedLease(lease=lease(indices=range(count)), token=b"token", deadline=time.monotonic() + 60.0)]


def indices(answers: list[Answer]) -> list[int]:
    return [one.index for answer in answers for one in answer.rollouts]


@asynccontextmanager
async def running(engine: Gated) -> AsyncIterator[tuple[SampleFeed, list[list[int]]]]:
    """A feed of `engine`, and what it handed on."""
    feed = SampleFeed(cast(Any, engine))
    handed: list[list[int]] = []

    async def done(answers: list[Answer]) -> None:
        handed.append(indices(answers))

    task = asyncio.create_task(feed.run(done))
    try:
        yield feed, handed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_half_of_what_is_ahead_waits_in_the_engine_and_each_end_sends_it_the_next() -> None:
    engine = Gated()
    async with running(engine) as (feed, handed):
        assert await feed.room() == Room(PLACES + AHEAD, PLACES)
        feed.add(leased(PLACES + AHEAD))
        await many_turns()
        assert sorted(engine.drawing) == list(range(PLACES + 1))
        assert feed.running == PLACES + 1
        await engine.end(3)
        assert sorted(engine.drawing) == list(range(PLACES + 2))
        assert (feed.running, handed) == (PLACES + 1, [[3]])


async def test_it_asks_once_half_of_what_is_ahead_is_missing() -> None:
    engine = Gated()
    async with running(engine) as (feed, _):
        feed.add(leased(PLACES + AHEAD))
        asking = asyncio.create_task(feed.room())
        await many_turns()
        assert not asking.done()
        await engine.end(0)
        assert await asking == Room(1, 0)
        await engine.end(1, 2)
        assert await feed.room() == Room(3, 1)


async def test_samples_that_end_together_are_handed_on_together() -> None:
    engine = Gated()
    async with running(engine) as (feed, handed):
        feed.add(leased(4))
        await many_turns()
        await engine.end(2, 0)
        assert [sorted(one) for one in handed] == [[0, 2]]


async def test_what_has_not_begun_is_taken_back_and_what_has_ends() -> None:
    engine = Gated()
    async with running(engine) as (feed, handed):
        await feed.idle()
        feed.add(leased(PLACES + AHEAD))
        await many_turns()
        assert {index for _, index in feed.take_back()} == {PLACES + 1}
        idle = asyncio.create_task(feed.idle())
        await engine.end(*range(PLACES))
        assert not idle.done()
        await engine.end(PLACES)
        await idle
        assert sorted(index for one in handed for index in one) == list(range(PLACES + 1))


async def test_while_answers_cannot_be_handed_on_nothing_new_is_asked_for() -> None:
    engine, stuck = Gated(), asyncio.Event()
    feed = SampleFeed(cast(Any, engine))

    async def done(answers: list[Answer]) -> None:
        await stuck.wait()

    task = asyncio.create_task(feed.run(done))
    feed.add(leased(PLACES + AHEAD))
    await many_turns()
    await engine.end(0)
    await engine.end(*range(1, PLACES + 1))
    await engine.end(PLACES + 1)
    asking = asyncio.create_task(feed.room())
    await many_turns()
    # One answer is being handed on; the others count as held.
    assert (await asking).capacity == 1
    stuck.set()
    await feed.idle()
    assert (await feed.room()).capacity == PLACES + AHEAD
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_that_breaks_ends_the_feed() -> None:
    engine = Gated()
    feed = SampleFeed(cast(Any, engine))

    async def done(answers: list[Answer]) -> None: ...

    task = asyncio.create_task(feed.run(done))
    feed.add(leased(2))
    await many_turns()
    engine.drawing[1].set_exception(ChildFailed("the engine died"))
    with pytest.raises(ExceptionGroup):
        await task
