"""Waiting for a change: nobody misses one, and many at once wake a waiter once."""

from __future__ import annotations

import asyncio

from swarm.aio import Changes


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
