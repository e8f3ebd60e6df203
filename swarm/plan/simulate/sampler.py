"""A sampler in a capacity simulation: an engine with places, and the requests that keep them filled.

A continuous engine (vLLM) fills each place on its own and asks whenever some are free. A lockstep engine (transformers)
fills all places together, waits for the longest sample, and asks one batch ahead, as sampler/session.py does. A sample
is drawn by the version that was installed when it started. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from swarm.pay.fleet import Lengths, Worker, mean_longest
from swarm.plan.simulate.desk import Desk, LeasedSample, Question
from swarm.plan.simulate.world import World
from swarm.types import NodeId


def token_s(worker: Worker, lengths: Lengths) -> float:
    """Return the seconds per token of one place that give the fleet's stated rate at full load."""
    if worker.lockstep:
        return worker.place_s / mean_longest(lengths.tokens, worker.samples_at_once)
    return worker.place_s / lengths.mean


class Occupancy:
    """The number of active samplers' places, and of those in use, over time."""

    def __init__(self) -> None:
        self.places = 0
        self.used = 0
        self.place_s = 0.0
        self.used_s = 0.0
        self._since = 0.0

    def change(self, *, now: float, places: int = 0, used: int = 0) -> None:
        """Change the numbers of places by these amounts from now on."""
        self.place_s += self.places * (now - self._since)
        self.used_s += self.used * (now - self._since)
        self._since = now
        self.places += places
        self.used += used

    def sums(self, *, now: float) -> tuple[float, float]:
        """Return the place-seconds so far, and those in use."""
        self.change(now=now)
        return self.place_s, self.used_s


class Sampler:
    """One life of one sampler. `over` is called after each answer that is handed in. `tokens` collects the lengths of
    answers; its reader empties it."""

    def __init__(
        self,
        worker: Worker,
        *,
        lengths: Lengths,
        world: World,
        desk: Desk,
        occupancy: Occupancy,
        over: Callable[[], None],
        failing: float = 0.0,
        fates: Random | None = None,
    ) -> None:
        self.worker = worker
        self.node = NodeId(worker.name)
        self.installed: int | None = None
        self.alive = True
        self.active = False
        self.tokens: list[float] = []
        self._lengths = lengths
        self._token_s = token_s(worker, lengths)
        self._world = world
        self._desk = desk
        self._occupancy = occupancy
        self._over = over
        self._failing = failing
        self._fates = fates or Random(0)
        self._question: Question | None = None
        self._running = 0
        self._queued: list[LeasedSample] = []

    @property
    def idle(self) -> bool:
        """Whether it has no samples."""
        return not self._running and not self._queued

    def activate(self) -> None:
        """Ask for work from now on, with the installed version."""
        assert self.alive
        if not self.active:
            self.active = True
            self._occupancy.change(now=self._world.now, places=self.worker.samples_at_once)
            self._ask()

    def stand_by(self) -> None:
        """Stop asking. Running samples finish and are handed in; queued ones are handed back."""
        if self.active:
            self.active = False
            self._occupancy.change(now=self._world.now, places=-self.worker.samples_at_once)
            self._withdraw()
            for job in self._queued:
                self._desk.plane.release(self.node, job.lease.group_id, job.index, now=self._world.now)
            self._queued = []

    def vanish(self) -> None:
        """Disappear without notice."""
        active = self.active
        self._withdraw()
        self.alive = self.active = False
        self._occupancy.change(
            now=self._world.now, places=-self.worker.samples_at_once if active else 0, used=-self._running
        )

    def install(self, version: int) -> None:
        """Start samples with `version` from now on; running ones keep theirs."""
        if self.installed is None or version > self.installed:
            self.installed = version
            if self._question is not None:
                self._withdraw()
            self._begin_batch()
            self._ask()

    # -- inside ----------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if not self.active or self.installed is None:
            return
        places = self.worker.samples_at_once
        if self.worker.lockstep:
            capacity, at_once = (0 if self._queued else places), (0 if self._running else places)
        else:
            capacity = at_once = places - self._running
        if self._question is not None:
            self._question.capacity, self._question.at_once = capacity, at_once
        elif capacity > 0:
            self._question = Question(
                node=self.node,
                held=self.installed,
                capacity=capacity,
                at_once=at_once,
                answer_s=self._lengths.mean * self._token_s,
                asked_at=self._world.now,
                given=self._given,
            )
            self._desk.ask(self._question)

    def _withdraw(self) -> None:
        if self._question is not None:
            self._desk.withdraw(self._question)
            self._question = None

    def _given(self, jobs: list[LeasedSample]) -> None:
        self._question = None
        if self.worker.lockstep:
            self._queued = jobs
            self._begin_batch()
        else:
            self._use(len(jobs))
            for job in jobs:
                self._later(self._length(job) * self._token_s, [job])
        self._ask()

    def _begin_batch(self) -> None:
        if not self._running and self._queued:
            jobs, self._queued = self._queued, []
            self._use(len(jobs))
            self._later(max(self._length(job) for job in jobs) * self._token_s, jobs)

    def _later(self, duration_s: float, jobs: list[LeasedSample]) -> None:
        version = self.installed
        assert version is not None
        failed = self._failing > 0 and self._fates.random() < self._failing
        if failed:
            duration_s *= self._fates.random()
        self._world.schedule(duration_s, "rollout", lambda: self._finish(jobs, version, failed))

    def _finish(self, jobs: list[LeasedSample], version: int, failed: bool) -> None:
        if not self.alive:
            return
        self._use(-len(jobs))
        if self.worker.lockstep:
            self._withdraw()  # The question was asked ahead; now the engine is free.
        for job in jobs:
            self._desk.submit(self.node, job, version=version, failed=failed, now=self._world.now)
            if not failed:
                self.tokens.append(self._length(job))
        self._begin_batch()
        self._ask()
        self._over()

    def _length(self, job: LeasedSample) -> float:
        return self._lengths.tokens[int(job.share * len(self._lengths.tokens))]

    def _use(self, places: int) -> None:
        self._running += places
        self._occupancy.change(now=self._world.now, used=places)
