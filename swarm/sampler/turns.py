"""Hands in the turns of episodes, those together that are drawn by the time a request is free.

A reply has what the learner's environments have answered so far. What it does not have is handed in again, so a quick
turn does not wait for a slow one. A few requests are under way at a time, since each may be held open by slow turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from swarm.errors import ProtocolError
from swarm.net.client import SlowLine
from swarm.rollout.messages import Answer, Stepped
from swarm.sampler.client import PORTION_BYTES, SLOW_PAUSE_S, portions

REQUESTS = 3  # At a time. The learner holds four of a node open, and a node has eight connections

Waiting = tuple[Answer, asyncio.Future[Stepped]]


class Turns:
    """Turns that wait for an environment's answer. `submit` hands some in, and returns what was answered."""

    def __init__(self, submit: Callable[[list[Answer]], Awaitable[list[Stepped]]]) -> None:
        self._submit = submit
        self._queue: deque[Waiting] = deque()
        self._wake = asyncio.Condition()
        self._portion_bytes = PORTION_BYTES

    async def step(self, answer: Answer) -> Stepped:
        """Return what the environment said to this turn."""
        future: asyncio.Future[Stepped] = asyncio.get_running_loop().create_future()
        await self._put([(answer, future)])
        return await future

    async def run(self) -> None:
        """Hand in turns until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(REQUESTS):
                group.create_task(self._hand_in())

    async def _hand_in(self) -> None:
        while True:
            async with self._wake:
                await self._wake.wait_for(lambda: self._queue)
            await asyncio.sleep(0)  # Others may be drawn in the same moment.
            if some := self._take():
                await self._give_out(some)
                await self._put([one for one in some if not one[1].done()])

    async def _give_out(self, some: list[Waiting]) -> None:
        """Hand in `some`, and give out what comes back; over a slow line nothing does."""
        try:
            replies = await self._submit([answer for answer, _ in some])
        except SlowLine:
            self._portion_bytes = max(1, self._portion_bytes // 2)
            await asyncio.sleep(SLOW_PAUSE_S)
            return
        except ProtocolError:
            replies = [_refused(answer) for answer, _ in some]
        found = {(one.group_id, one.index, one.turn): one for one in replies}
        for answer, future in some:
            said = found.get((*answer.sample, answer.turn))
            if said is not None and not future.done():
                future.set_result(said)
        self._portion_bytes = min(PORTION_BYTES, self._portion_bytes * 5 // 4 + 1)

    def _take(self) -> list[Waiting]:
        """Take as many of the waiting turns as go in one request."""
        waiting = [one for one in self._queue if not one[1].done()]
        count = len(portions([answer for answer, _ in waiting], self._portion_bytes)[0]) if waiting else 0
        self._queue = deque(waiting[count:])
        return waiting[:count]

    async def _put(self, waiting: list[Waiting]) -> None:
        if waiting:
            self._queue.extend(waiting)
            async with self._wake:
                self._wake.notify()


def _refused(answer: Answer) -> Stepped:
    group_id, index = answer.sample
    return Stepped(group_id=group_id, index=index, turn=answer.turn, verdict="malformed", ended=True)
