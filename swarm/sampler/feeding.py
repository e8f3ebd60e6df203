"""How leases enter an engine and answers leave it: each sample on its own, or a batch at a time.

A feed holds leases until they are drawn. `room` waits until it can take more. So a feed holds at most the engine's
places and a share ahead of them, or in lockstep one batch in the engine and one ahead of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from swarm.rollout.messages import MAX_SAMPLES_PER_ASK, Answer, SampleName
from swarm.sampler.playing import Game, Step
from swarm.sampler.worker import EngineWorker
from swarm.types import Lease

AHEAD = 4  # One sample is held ahead per 4 places: enough to refill them during a request, and few, since they age

Done = Callable[[set[SampleName], list[Answer]], Awaitable[None]]
"""Takes the names of samples that ended, and those answers that are still to be handed in."""


class Room(NamedTuple):
    """How many samples can be added, and how many of these start at once in free places; see LeaseRequest."""

    capacity: int
    at_once: int


def room_of(places: int, held: int) -> Room:
    """Return what an engine that holds `held` samples has room for."""
    missing = min(MAX_SAMPLES_PER_ASK, places + spare_of(places)) - held
    # Places that fall free while a request is on its way are as good as free ones.
    return Room(missing, max(0, missing - spare_of(places)))


def spare_of(places: int) -> int:
    """Return how many samples are held ahead. Once half of them are missing it is time to ask: a request for each one
    would be too many."""
    return -(-places // AHEAD)


class Feed:
    """Each sample starts when a place is free; answers that arrive together are handed on together. Half of the samples
    ahead wait in the engine itself, so that its next step fills a free place. An engine in lockstep gets all that wait
    once it has drawn its batch, at most as many as it has places.

    An episode whose environment is to answer has no place: another sample is asked for, and takes it. When it comes
    back it is the first to get one. `step` hands in its turns."""

    def __init__(self, engine: EngineWorker, step: Step) -> None:
        self._engine, self._step = engine, step
        self._waiting: deque[Game] = deque()
        self._ended: list[tuple[SampleName, Answer | None]] = []
        self._in_engine = engine.places + spare_of(engine.places) // 2
        self._is_closing = self._plays = self._follows = False
        # Each event has one waiter, which checks the state itself.
        self._beginnable, self._answered, self._roomy, self._idle = (asyncio.Event() for _ in range(4))
        self._idle.set()
        self.running = self._thinking = 0

    async def room(self) -> Room:
        """Wait until more leases may be added."""
        while 2 * (room := self._room()).capacity < spare_of(self._engine.places):
            self._roomy.clear()
            await self._roomy.wait()
        return room

    def add(self, leases: list[Lease]) -> None:
        games = games_of(leases)
        self._plays = self._plays or any(game.is_episode for game in games)
        self._waiting.extend(games)
        self._beginnable.set()

    def take_back(self) -> set[SampleName]:
        """Forget the samples that have not started, and return them."""
        names = {game.name for game in self._waiting}
        self._waiting.clear()
        self._is_closing = True
        return names

    async def run(self, done: Done) -> None:
        """Draw until cancelled. Raise ChildFailed if the engine breaks. `done` is awaited before it gets more."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hand_on(done))
            while True:
                await self._beginnable.wait()
                self._beginnable.clear()
                while games := self._next():
                    self.running += len(games)
                    self._idle.clear()
                    self._roomy.set()
                    group.create_task(self._draw(games))

    async def idle(self) -> None:
        """Return when nothing is running and `done` has all answers."""
        await self._idle.wait()

    def _room(self) -> Room:
        if self._engine.lockstep:
            return Room(0 if self._waiting or self._ended else self._engine.places, 0)
        room = room_of(self._engine.places, self.running + len(self._waiting) + len(self._ended))
        # A turn is short: a place falls free before the answer to a question is here.
        return Room(room.capacity, room.capacity) if self._plays else room

    def _next(self) -> list[Game]:
        """Take the samples that begin now in one call of the engine."""
        if self._engine.lockstep:
            count = 0 if self.running else self._engine.places
        else:
            count = 1 if self.running < self._in_engine else 0
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    async def _draw(self, games: list[Game]) -> None:
        """Draw what is next of some games, and let their environments answer without places in the engine."""
        drawn = await self._engine.draw(games, follows=self._follows)
        self._follows = bool(self._waiting)
        self.running -= len(games)
        self._beginnable.set()
        turns: list[Awaitable[None]] = []
        ended: list[tuple[SampleName, Answer | None]] = []
        for game, one in zip(games, drawn, strict=True):
            answer = game.answer(one)
            if self._is_closing and answer.rollout.finish == "failed":
                ended.append((game.name, None))  # An engine that was given up before a sample's first token
            elif game.is_episode:
                turns.append(self._go_on(game, answer))
            else:
                ended.append((game.name, answer))
        self._end(ended)
        self._thinking += len(turns)
        self._roomy.set()
        await asyncio.gather(*turns)

    async def _go_on(self, game: Game, turn: Answer) -> None:
        said = await self._step(turn)
        self._thinking -= 1
        if not game.goes_on(said):
            self._end([(game.name, None)])
        elif not self._is_closing:
            self._waiting.appendleft(game)
            self._beginnable.set()
        self._answered.set()

    def _end(self, ended: list[tuple[SampleName, Answer | None]]) -> None:
        self._ended += ended
        self._answered.set()

    async def _hand_on(self, done: Done) -> None:
        while True:
            await self._answered.wait()
            self._answered.clear()
            ended, self._ended = self._ended, []
            if ended:
                await done({name for name, _ in ended}, [answer for _, answer in ended if answer is not None])
            self._roomy.set()
            if not self.running and not self._thinking and not self._ended:
                self._idle.set()


def games_of(leases: Sequence[Lease]) -> list[Game]:
    return [Game(lease, spec) for lease in leases for spec in lease.samples]
