"""What a feed asks for, begins and hands on, with an engine whose samples end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm.errors import ChildFailed
from swarm.rollout.messages import MAX_SAMPLES_PER_ASK, Answer, SampleName, Stepped
from swarm.sampler.engine import Sampled, failed
from swarm.sampler.feeding import Feed, Room, room_of, spare_of
from swarm.sampler.playing import Game, Step
from swarm.sampler.worker import Rates
from swarm.types import EpisodeProgress, Lease
from tests.builders import lease, rollout
from tests.unit.wires import many_turns

PLACES = 8
AHEAD = 2


class Gated:
    """Stands for an engine's worker: a sample ends when it is released, or breaks with what it is released with."""

    places = PLACES

    def __init__(self, *, lockstep: bool = False) -> None:
        self.lockstep = lockstep
        self.rates = Rates(PLACES)
        self.drawing: dict[int, asyncio.Future[None]] = {}
        self.calls: list[tuple[list[int], bool]] = []
        one = rollout()
        self.drawn = Sampled(one.token_ids, one.logprobs, one.spans, one.finish)

    async def draw(self, games: Sequence[Game], *, follows: bool) -> list[Sampled]:
        """The seed of a sample is its index, as in builders.lease."""
        names = [game.name[1] for game in games]
        self.calls.append((names, follows))
        gates = [asyncio.get_running_loop().create_future() for _ in names]
        self.drawing.update(zip(names, gates, strict=True))
        await asyncio.gather(*gates)
        return [self.drawn] * len(names)

    async def end(self, *indices: int) -> None:
        for index in indices:
            self.drawing[index].set_result(None)
        await many_turns()


def leased(count: int, *, first: int = 0, episode: EpisodeProgress | None = None) -> list[Lease]:
    return [replace(lease(indices=range(first, first + count)), episode=episode)]


async def never(answer: Answer) -> Stepped:
    raise AssertionError


@asynccontextmanager
async def running(
    engine: Gated, step: Step = never, stuck: asyncio.Event | None = None
) -> AsyncIterator[tuple[Feed, list[list[int]]]]:
    """A feed of `engine`, and what it handed on; nothing before `stuck` is set."""
    feed = Feed(cast(Any, engine), step)
    handed: list[list[int]] = []

    async def done(samples: set[SampleName], answers: list[Answer]) -> None:
        if stuck is not None:
            await stuck.wait()
        handed.append([index for _, index in samples])

    task = asyncio.create_task(feed.run(done))
    try:
        yield feed, handed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_half_of_what_is_ahead_waits_in_the_engine_and_once_as_much_is_missing_it_asks() -> None:
    engine = Gated()
    async with running(engine) as (feed, handed):
        assert await feed.room() == Room(PLACES + AHEAD, PLACES)
        feed.add(leased(PLACES + AHEAD))
        asking = asyncio.create_task(feed.room())
        await many_turns()
        assert sorted(engine.drawing) == list(range(PLACES + 1))
        assert (feed.running, asking.done()) == (PLACES + 1, False)
        await engine.end(3)
        assert sorted(engine.drawing) == list(range(PLACES + 2))
        assert (feed.running, handed) == (PLACES + 1, [[3]])
        assert await asking == Room(1, 0)
        await engine.end(1, 2)
        assert await feed.room() == Room(3, 1)


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
        assert [sorted(one) for one in handed] == [list(range(PLACES)), [PLACES]], "what ends together goes together"


@pytest.mark.parametrize("is_leaving", [False, True])
async def test_what_an_engine_that_was_given_up_could_not_begin_is_no_failure(is_leaving: bool) -> None:
    engine, handed = Gated(), list[Answer]()
    engine.drawn = failed("time limit")
    feed = Feed(cast(Any, engine), never)

    async def done(samples: set[SampleName], answers: list[Answer]) -> None:
        handed.extend(answers)

    task = asyncio.create_task(feed.run(done))
    feed.add(leased(1))
    await many_turns()
    if is_leaving:
        assert feed.take_back() == set()
    await engine.end(0)
    await feed.idle()
    task.cancel()
    assert [one.rollout.finish for one in handed] == ([] if is_leaving else ["failed"])


async def test_while_answers_cannot_be_handed_on_nothing_new_is_asked_for() -> None:
    engine, stuck = Gated(), asyncio.Event()
    async with running(engine, stuck=stuck) as (feed, _):
        feed.add(leased(PLACES + AHEAD))
        await many_turns()
        await engine.end(0)
        await engine.end(*range(1, PLACES + 1))
        await engine.end(PLACES + 1)
        # One answer is being handed on; the others count as held.
        assert (await feed.room()).capacity == 1
        stuck.set()
        await feed.idle()
        assert (await feed.room()).capacity == PLACES + AHEAD


async def test_an_engine_that_breaks_ends_the_feed() -> None:
    engine = Gated()
    feed = Feed(cast(Any, engine), never)

    async def done(samples: set[SampleName], answers: list[Answer]) -> None: ...

    task = asyncio.create_task(feed.run(done))
    feed.add(leased(2))
    await many_turns()
    engine.drawing[1].set_exception(ChildFailed("the engine died"))
    with pytest.raises(ExceptionGroup):
        await task


async def test_an_episode_has_no_place_while_its_environment_thinks_and_is_the_first_to_get_one() -> None:
    engine, said = Gated(), asyncio.Event()

    async def step(answer: Answer) -> Stepped:
        await said.wait()
        group_id, index = answer.sample
        return Stepped(group_id=group_id, index=index, turn=answer.turn, verdict="accepted", ended=answer.turn == 1)

    async with running(engine, step) as (feed, handed):
        feed.add(leased(PLACES + AHEAD, episode=EpisodeProgress(max_tokens=100)))
        await many_turns()
        assert len(engine.drawing) == PLACES + 1
        await engine.end(*range(4))
        assert feed.running == PLACES + AHEAD - 4
        assert await feed.room() == Room(4, 4), "a place falls free before the answer is here"
        said.set()
        await many_turns()
        assert (handed, feed.running) == ([], PLACES + 1)
        await engine.end(1, 2, 3)
        await engine.end(0)
        assert [sorted(one) for one in handed] == [[1, 2, 3], [0]]
        assert feed.take_back() == set()


async def test_an_episode_that_comes_back_after_the_rest_was_taken_back_is_left_to_others() -> None:
    engine, said = Gated(), asyncio.Event()

    async def step(answer: Answer) -> Stepped:
        await said.wait()
        return Stepped(group_id="t0", index=0, turn=0, verdict="accepted")

    async with running(engine, step) as (feed, handed):
        feed.add(leased(1, episode=EpisodeProgress(max_tokens=100)))
        await many_turns()
        await engine.end(0)
        feed.take_back()
        idle = asyncio.create_task(feed.idle())
        await many_turns()
        assert not idle.done()
        said.set()
        await idle
        assert (handed, feed.running) == ([], 0)


async def test_in_lockstep_one_batch_is_in_the_engine_and_one_ahead_of_it() -> None:
    engine = Gated(lockstep=True)
    async with running(engine) as (feed, handed):
        assert await feed.room() == Room(PLACES, 0)
        feed.add(leased(3))
        assert await feed.room() == Room(PLACES, 0)
        feed.add(leased(PLACES, first=3))
        asking = asyncio.create_task(feed.room())
        await many_turns()
        assert (engine.calls, feed.running, asking.done()) == ([([0, 1, 2], False)], 3, False)
        await engine.end(1)
        assert handed == []
        await engine.end(0, 2)
        assert ([sorted(one) for one in handed], await asking) == ([[0, 1, 2]], Room(PLACES, 0))
        assert engine.calls[1:] == [(list(range(3, 3 + PLACES)), True)]
        feed.add(leased(2, first=20))
        assert {index for _, index in feed.take_back()} == {20, 21}
        await engine.end(*range(3, 3 + PLACES))
        await feed.idle()


async def test_in_lockstep_a_batch_is_not_asked_for_while_the_last_one_cannot_be_handed_on() -> None:
    engine, stuck = Gated(lockstep=True), asyncio.Event()
    async with running(engine, stuck=stuck) as (feed, _):
        for first in (0, 2, 4):
            feed.add(leased(2, first=first))
            await many_turns()
            if first < 4:
                await engine.end(first, first + 1)
        asking = asyncio.create_task(feed.room())
        await many_turns()
        assert not asking.done()
        stuck.set()
        assert await asking == Room(PLACES, 0)


async def test_in_lockstep_episodes_that_were_answered_together_go_on_together_and_wait_for_no_other() -> None:
    engine, slow = Gated(lockstep=True), asyncio.Event()

    async def step(answer: Answer) -> Stepped:
        group_id, index = answer.sample
        if index == 2:
            await slow.wait()
        return Stepped(group_id=group_id, index=index, turn=answer.turn, verdict="accepted", ended=answer.turn == 1)

    async with running(engine, step) as (feed, handed):
        feed.add(leased(3, episode=EpisodeProgress(max_tokens=100)))
        await many_turns()
        await engine.end(0, 1, 2)
        slow.set()
        await many_turns()
        await engine.end(0, 1)
        await engine.end(2)
        assert [sorted(names) for names, _ in engine.calls] == [[0, 1, 2], [0, 1], [2]]
        assert [sorted(one) for one in handed] == [[0, 1], [2]]


@given(places=st.integers(1, 512), held=st.integers(0, 600))
def test_what_is_asked_for_fills_the_places_and_what_is_ahead(places: int, held: int) -> None:
    room = room_of(places, held)
    assert held + room.capacity == min(MAX_SAMPLES_PER_ASK, places + spare_of(places))
    assert 0 <= room.at_once <= max(0, room.capacity)
    assert room.at_once >= min(places, MAX_SAMPLES_PER_ASK - spare_of(places)) - held
