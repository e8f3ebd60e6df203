"""Hands in what was drawn, those answers together that are there by the time a request is free.

A reply has the verdicts on all completions, and what environments have said so far to turns of episodes. Turns that it
does not have are handed in again, so a quick turn does not wait for a slow one. Three requests are under way at a time,
since some may be held open by slow turns. Handing in again is harmless: the learner knows what it has accepted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from swarm.aio import Changes
from swarm.net.client import SlowLine
from swarm.rollout.messages import MAX_SUBMITTED, Answer, Stepped
from swarm.wire import RATIO_FREE_BYTES

REQUESTS = 3  # At a time
PORTION_BYTES = RATIO_FREE_BYTES * 7 // 8  # An unpacked submission: too small to count as a zip bomb
ROLLOUT_OVERHEAD_BYTES = 400  # What a rollout takes besides its tokens: ids, a few spans, a reason

SLOW_PAUSE_S = 3.0
"""Pause after a submission that was too slow. The cause (weights under way, lost packets) may pass. The learner waits
2 s or more for a body, so a dead line costs it a dozen tries a minute."""

Waiting = tuple[Answer, asyncio.Future[Stepped]]


class Handing:
    """Answers that wait for what the learner says. `submit` hands some in. `say` tells a person of a slow line."""

    def __init__(self, submit: Callable[[list[Answer]], Awaitable[list[Stepped]]], say: Callable[[str], None]) -> None:
        self._submit = submit
        self._say = say
        self._queue: deque[Waiting] = deque()
        self._came = Changes()
        self._portion_bytes = PORTION_BYTES

    async def hand_in(self, answer: Answer) -> Stepped:
        """Return what the learner says to this answer."""
        (said,) = await self.hand_in_all([answer])
        return said

    async def hand_in_all(self, answers: Sequence[Answer]) -> list[Stepped]:
        loop = asyncio.get_running_loop()
        waiting: list[Waiting] = [(answer, loop.create_future()) for answer in answers]
        self._queue.extend(waiting)
        self._came.tell()
        return list(await asyncio.gather(*(future for _, future in waiting)))

    async def run(self) -> None:
        """Hand in until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(REQUESTS):
                group.create_task(self._hand_in())

    async def _hand_in(self) -> None:
        while True:
            while not self._queue:
                await self._came.wait(self._came.count, None)
            await asyncio.sleep(0)  # Others may be drawn in the same moment.
            if some := self._take():
                await self._give_out(some)
                self._queue.extendleft(one for one in reversed(some) if not one[1].done())
                self._came.tell()

    async def _give_out(self, some: list[Waiting]) -> None:
        """Hand in `some`, and give out what comes back; over a slow line nothing does."""
        try:
            replies = await self._submit([answer for answer, _ in some])
        except SlowLine as why:
            await self._send_less(some, why)
            return
        if not self._queue:
            # Grow by a quarter, so that a line that stays slow is overloaded every fourth batch, not every time.
            self._portion_bytes = min(PORTION_BYTES, self._portion_bytes * 5 // 4)
        found = {(one.group_id, one.index, one.turn): one for one in replies}
        for answer, future in some:
            said = found.get((*answer.sample, answer.turn))
            if said is not None and not future.done():
                future.set_result(said)

    async def _send_less(self, some: list[Waiting], why: SlowLine) -> None:
        """Halve the size of `some` for the requests from now on, and pause."""
        if self._portion_bytes == PORTION_BYTES:
            self._say(f"{why}; rollouts are sent again, fewer at once")
        self._portion_bytes = sum(_size_bytes(answer) for answer, _ in some) // 2
        await asyncio.sleep(SLOW_PAUSE_S)

    def _take(self) -> list[Waiting]:
        """Take as many of the waiting answers as go in one request: at least one, if any waits."""
        some: list[Waiting] = []
        size = 0
        while self._queue and len(some) < MAX_SUBMITTED:
            size += _size_bytes(self._queue[0][0])
            if some and size > self._portion_bytes:
                break
            one = self._queue.popleft()
            if not one[1].done():  # Else who asked has gone.
                some.append(one)
        return some


def _size_bytes(answer: Answer) -> int:
    return 9 * answer.rollout.length + ROLLOUT_OVERHEAD_BYTES
