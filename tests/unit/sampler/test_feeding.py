"""What a feed asks for, begins and hands on, with an engine whose samples end when the test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm.errors import ChildFailed
from swarm.rollout.messages import MAX_SAMPLES_PER_ASK, Answer
from swarm.sampler import feeding
from swarm.sampler.client import TimedLease
from swarm.sampler.feeding import Room, SampleFeed, room_of, spare_of
from swarm.sampler.worker import Rates
from swarm.types import SampleSpec
from tests.builders import lease, rollout
from tests.unit.wires import many_turns

PLACES = 8
AHEAD = 2


class Gated:
    """Stands for an engine's worker: a sample ends when it is released, or breaks with what it is released with."""

    places = PLACES

    def __init__(self) -> None:
        self.rates = Rates(PLACES)
        self.drawing: dict[int, asyncio.Future[None]] = {}

    async def draw(self, timed: TimedLease, spec: SampleSpec) -> Answer:
        gate = self.drawing[spec.index] = asyncio.get_running_loop().create_future()
        await gate
        return Answer(rollout(group_id=timed.lease.group_id, index=spec.index))

    async def end(self, *indices: int) -> None:
        for index in indices:
            self.drawing[index].set_result(None)
        await many_turns()


def leased(count: int) -> list[TimedLease]:
    return [TimedLease(lease=lease(indices=range(count)), deadline=time.monotonic() + 60.0)]


class Clock:
    """Stands for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def indices(answers: list[Answer]) -> list[int]:
    return [answer.rollout.index for answer in answers]


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
        assert {index for _, index, _ in feed.take_back()} == {PLACES + 1}
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


async def ask_and_draw(feed: SampleFeed, engine: Gated, clock: Clock, *, turn_number: int, short: int = 0) -> None:
    """Let a request take 0.1 s and be answered but for `short`, and draw what it brings."""
    count = (await feed.room()).capacity - short
    clock.now += 0.1
    one = replace(lease(indices=range(count)), turn=turn_number)
    feed.add([TimedLease(lease=one, deadline=60.0)])
    await many_turns()
    drawn: set[int] = set()
    while begun := set(engine.drawing) - drawn:
        drawn |= begun
        await engine.end(*begun)
    engine.drawing.clear()


async def test_what_ends_within_two_requests_is_held_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, engine = Clock(), Gated()
    monkeypatch.setattr(feeding, "time", clock)
    engine.rates.full_rollouts_per_s = 100.0
    async with running(engine) as (feed, _):
        for _ in range(100):
            await ask_and_draw(feed, engine, clock, turn_number=1)
        # In twice 0.1 s the places draw 20 turns. The request for them is made as soon as for the few of before.
        assert await feed.room() == Room(PLACES + AHEAD + 20, PLACES + 20)
        engine.rates.full_rollouts_per_s = 1e9
        assert (await feed.room()).capacity == MAX_SAMPLES_PER_ASK


@pytest.mark.parametrize(("turn_number", "short"), [(0, 0), (1, 1)])
async def test_first_turns_and_what_the_learner_held_open_say_nothing_of_requests(
    monkeypatch: pytest.MonkeyPatch, turn_number: int, short: int
) -> None:
    clock, engine = Clock(), Gated()
    monkeypatch.setattr(feeding, "time", clock)
    engine.rates.full_rollouts_per_s = 100.0
    async with running(engine) as (feed, _):
        for _ in range(20):
            await ask_and_draw(feed, engine, clock, turn_number=turn_number, short=short)
        assert await feed.room() == Room(PLACES + AHEAD, PLACES)


@given(places=st.integers(1, 512), held=st.integers(0, 600), meanwhile=st.integers(0, 600))
def test_what_is_asked_for_fills_the_places_and_what_is_ahead(places: int, held: int, meanwhile: int) -> None:
    room = room_of(places, held, meanwhile)
    assert held + room.capacity == min(MAX_SAMPLES_PER_ASK, places + spare_of(places) + meanwhile)
    assert 0 <= room.at_once <= max(0, room.capacity)
    assert room.at_once >= min(places, MAX_SAMPLES_PER_ASK - spare_of(places)) - held
