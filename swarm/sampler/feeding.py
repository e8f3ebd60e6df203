"""How leases enter an engine and answers leave it: a batch at a time, or each sample on its own.

A feed holds leases until they are drawn. `room` waits until it can take more, so a feed holds at most the engine's
places and a share ahead of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from swarm.rollout.messages import MAX_SAMPLES_PER_ASK, Answer, SampleName
from swarm.sampler.client import TimedLease
from swarm.sampler.worker import EngineWorker
from swarm.types import SampleSpec

AHEAD = 4  # One sample is held ahead per 4 places: enough to refill them during a request, and few, since they age
ASKING_SMOOTHING = 0.1  # Weight of the newest request in how long requests take: ten follow a change

Done = Callable[[list[Answer]], Awaitable[None]]


class Room(NamedTuple):
    """How many samples can be added, and how many of these start at once in free places; see LeaseRequest."""

    capacity: int
    at_once: int


def room_of(places: int, held: int, meanwhile: int = 0) -> Room:
    """Return what an engine that holds `held` samples has room for, if `meanwhile` end until a request is answered."""
    missing = min(MAX_SAMPLES_PER_ASK, places + spare_of(places) + meanwhile) - held
    # Places that fall free while a request is on its way are as good as free ones.
    return Room(missing, max(0, missing - spare_of(places)))


def spare_of(places: int) -> int:
    """Return how many samples are held ahead. Once half of them are missing it is time to ask: a request for each one
    would be too many."""
    return -(-places // AHEAD)


class BatchFeed:
    """One batch in the engine and one ahead of it. `running` counts the samples in the engine."""

    def __init__(self, engine: EngineWorker) -> None:
        self._engine = engine
        self._next: asyncio.Queue[list[TimedLease]] = asyncio.Queue(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0

    async def room(self) -> Room:
        """Wait until more leases may be added."""
        await self._next.join()
        return Room(self._engine.places, 0)

    def add(self, leases: list[TimedLease]) -> None:
        self._next.put_nowait(leases)

    def take_back(self) -> set[SampleName]:
        """Forget the samples that have not started, and return them."""
        leases = [] if self._next.empty() else self._next.get_nowait()
        return {name for timed in leases for name in timed.samples()}

    async def run(self, done: Done) -> None:
        """Draw until cancelled. Raise ChildFailed if the engine breaks. `done` is awaited before more answers come."""
        follows = False
        while True:
            leases = await self._next.get()
            self._idle.clear()
            self.running = sum(len(timed.lease.samples) for timed in leases)
            self._next.task_done()
            answers = await self._engine.draw_batch(leases, follows=follows)
            follows = not self._next.empty()
            await done(answers)
            self.running = 0
            self._idle.set()

    async def idle(self) -> None:
        """Return when nothing is running and `done` has all answers."""
        await self._idle.wait()


class SampleFeed:
    """Each sample starts when a place is free; answers that arrive together are handed on together. Half of the samples
    ahead wait in the engine itself, so that its next step fills a free place.

    Turns are short, so many of them end until a request is answered: up to two requests later, if the first has just
    left. As many more are held ahead. It does not matter for how long an episode is away: while its environment
    answers, the learner hands out another's turn, or begins one. What waits here is older when it is drawn."""

    def __init__(self, engine: EngineWorker) -> None:
        self._engine = engine
        self._waiting: deque[tuple[TimedLease, SampleSpec]] = deque()
        self._answers: list[Answer] = []
        self._in_engine = engine.places + spare_of(engine.places) // 2
        self._asked, self._asked_at = Room(0, 0), 0.0
        self._asking_s = 0.0
        # Each event has one waiter, which checks the state itself.
        self._beginnable, self._answered, self._roomy, self._idle = (asyncio.Event() for _ in range(4))
        self._idle.set()
        self.running = 0

    async def room(self) -> Room:
        while 2 * (room := self._room()).capacity < spare_of(self._engine.places):
            self._roomy.clear()
            await self._roomy.wait()
        self._asked, self._asked_at = room, time.monotonic()
        return room

    def add(self, leases: list[TimedLease]) -> None:
        samples = [(timed, spec) for timed in leases for spec in timed.lease.samples]
        asked = self._asked
        if asked.at_once and len(samples) == asked.capacity and any(timed.lease.turn for timed in leases):
            # Others may have been held open, for lack of samples or because no place was free.
            self._asking_s += ASKING_SMOOTHING * (time.monotonic() - self._asked_at - self._asking_s)
        self._waiting.extend(samples)
        self._beginnable.set()

    def take_back(self) -> set[SampleName]:
        names = {(timed.lease.group_id, spec.index, timed.lease.turn) for timed, spec in self._waiting}
        self._waiting.clear()
        return names

    async def run(self, done: Done) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hand_on(done))
            while True:
                await self._beginnable.wait()
                self._beginnable.clear()
                while self._waiting and self.running < self._in_engine:
                    self.running += 1
                    self._idle.clear()
                    group.create_task(self._draw(*self._waiting.popleft()))

    async def idle(self) -> None:
        await self._idle.wait()

    def _room(self) -> Room:
        held = self.running + len(self._waiting) + len(self._answers)
        meanwhile = math.ceil(2 * self._asking_s * self._engine.rates.full_rollouts_per_s)
        return room_of(self._engine.places, held, meanwhile)

    async def _draw(self, timed: TimedLease, spec: SampleSpec) -> None:
        answer = await self._engine.draw(timed, spec)
        self._answers.append(answer)  # Not in one line: `_answers` may have been replaced while this waited.
        self.running -= 1
        self._answered.set()
        self._beginnable.set()

    async def _hand_on(self, done: Done) -> None:
        while True:
            await self._answered.wait()
            self._answered.clear()
            answers, self._answers = self._answers, []
            if answers:
                await done(answers)
            self._roomy.set()
            if not self.running and not self._answers:
                self._idle.set()


Feed = BatchFeed | SampleFeed


def feed_of(engine: EngineWorker) -> Feed:
    """Return the feed for a loaded engine."""
    return BatchFeed(engine) if engine.lockstep else SampleFeed(engine)
