"""Prompts made ahead: off the loop, in order, so many and no more, and waited for before a question is answered."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.aio import Changes
from swarm.errors import UserError
from swarm.rollout.ahead import PromptsAhead
from swarm.types import Prompt


class Maker:
    """Prompts by number, made once the gate is open; which ones, and whether on another thread than the test's."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.numbers: list[int] = []
        self.elsewhere: list[bool] = []

    def __call__(self, number: int) -> Prompt:
        assert self.gate.wait(60)
        if number == 13:
            raise UserError("prompt 13 cannot be made")
        self.numbers.append(number)
        self.elsewhere.append(threading.current_thread() is not threading.main_thread())
        return Prompt(prompt_id=f"p-{number}", text="", answer="")


async def until_made(ahead: PromptsAhead, count: int) -> None:
    while not ahead.has(count):
        await ahead.wait(60)


async def test_the_next_ones_are_made_elsewhere_and_no_more_than_asked_for() -> None:
    maker = Maker()
    ahead = PromptsAhead(maker, first=5, most=4)
    ahead.begin()
    running = asyncio.create_task(ahead.run())
    await ahead.wait(0)
    assert not ahead.has(1)
    maker.gate.set()
    await until_made(ahead, 100)
    assert maker.numbers == [5, 6, 7, 8]
    assert [ahead(number).prompt_id for number in (5, 6)] == ["p-5", "p-6"]
    await until_made(ahead, 4)
    assert maker.numbers == [5, 6, 7, 8, 9, 10]
    assert all(maker.elsewhere)
    assert ahead(2).prompt_id == "p-2"
    assert ahead(7).prompt_id == "p-7"
    running.cancel()


def test_a_prompt_that_takes_for_ever_keeps_nobody_who_stops() -> None:
    maker = Maker()

    async def stop_at_once() -> None:
        ahead = PromptsAhead(maker, first=0, most=1)
        ahead.begin()
        running = asyncio.create_task(ahead.run())
        await ahead.wait(0)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(stop_at_once())
    maker.gate.set()


async def test_one_that_was_not_waited_for_is_made_at_once_and_not_kept_twice() -> None:
    maker = Maker()
    ahead = PromptsAhead(maker, first=0, most=2)
    ahead.begin()
    running = asyncio.create_task(ahead.run())
    await asyncio.sleep(0)
    maker.gate.set()
    given = [ahead(number).prompt_id for number in range(3)]
    await until_made(ahead, 2)
    assert [*given, ahead(3).prompt_id, ahead(4).prompt_id] == ["p-0", "p-1", "p-2", "p-3", "p-4"]
    running.cancel()


async def test_a_prompt_that_cannot_be_made_ends_the_run() -> None:
    maker = Maker()
    maker.gate.set()
    ahead = PromptsAhead(maker, first=13, most=1)
    ahead.begin()
    with pytest.raises(UserError, match="prompt 13"):
        await ahead.run()


# -- waiting for a change ------------------------------------------------------------------------------------------


async def test_those_of_the_lowest_rank_go_on_first() -> None:
    changes, order = Changes(), list[float]()

    async def wait(rank: float) -> None:
        await changes.wait(changes.count, None, rank=rank)
        order.append(rank)

    waiting = [asyncio.create_task(wait(rank)) for rank in (2.0, 0.0, 3.0, 1.0)]
    await asyncio.sleep(0)
    changes.tell()
    await asyncio.gather(*waiting)
    assert order == [0.0, 1.0, 2.0, 3.0]


async def test_a_change_that_came_before_the_wait_is_not_missed() -> None:
    changes = Changes()
    seen = changes.count
    changes.tell()
    await changes.wait(seen, None)
