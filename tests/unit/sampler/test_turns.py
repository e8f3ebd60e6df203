"""Turns go to the learner together, and come back as their environments answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm.errors import ProtocolError
from swarm.net.client import SlowLine
from swarm.rollout.messages import Answer, Stepped
from swarm.sampler import turns as turns_module
from swarm.sampler.turns import REQUESTS, Turns
from tests.builders import rollout
from tests.unit.wires import many_turns


class Learner:
    """Answers the turns of `ready`, once it is let go on; `faults` come first."""

    def __init__(self, *ready: int) -> None:
        self.ready = set(ready)
        self.requests: list[list[int]] = []
        self.faults: list[Exception] = []
        self.goes_on = asyncio.Event()

    async def submit(self, turns: list[Answer]) -> list[Stepped]:
        self.requests.append([one.rollout.index for one in turns])
        await self.goes_on.wait()
        if self.faults:
            raise self.faults.pop()
        return [stepped(one) for one in turns if one.rollout.index in self.ready]


def stepped(answer: Answer) -> Stepped:
    group_id, index = answer.sample
    return Stepped(group_id=group_id, index=index, turn=answer.turn, verdict="accepted", token_ids=b"seen")


@asynccontextmanager
async def running(learner: Learner, *indices: int) -> AsyncIterator[tuple[Turns, list[asyncio.Task[Stepped]]]]:
    """Turns of these samples under way."""
    turns = Turns(learner.submit)
    task = asyncio.create_task(turns.run())
    asked = [asyncio.create_task(turns.step(Answer(rollout(index=index)))) for index in indices]
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
        later = asyncio.create_task(turns.step(Answer(rollout(index=2))))
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
            asked.append(asyncio.create_task(turns.step(Answer(rollout(index=index)))))
            await many_turns()
        assert learner.requests == [[index] for index in range(REQUESTS)]
        for one in asked:
            one.cancel()


async def test_turns_that_the_learner_does_not_take_end_their_episodes() -> None:
    learner = Learner(0)
    learner.faults = [ProtocolError("not these")]
    learner.goes_on.set()
    async with running(learner, 0) as (_, (asked,)):
        said = await asked
        assert (said.verdict, said.ended) == ("malformed", True)


async def test_over_a_slow_line_fewer_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "SLOW_PAUSE_S", 0.0)
    learner = Learner(0, 1, 2, 3)
    learner.faults = [SlowLine("slow")] * 14
    learner.goes_on.set()
    async with running(learner, 0, 1, 2, 3) as (_, asked):
        assert {(await one).index for one in asked} == {0, 1, 2, 3}
        assert min(map(len, learner.requests)) < 4
