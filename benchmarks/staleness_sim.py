"""A learner and a fleet of one-slot workers on a virtual clock, for benchmarks/staleness.py.

Theory of operation. Events are (time, order, callback) in a heap; times are in seconds, a learner step takes STEP_S.
A worker generates one sample at a time, with the newest version that had reached it when it began, and asks for its
next sample when it begins one (`ahead`, as sampler/session.py does) or when it has none. A question that finds nothing
stays with the learner and is tried again at every change, as rollout/api.py does. Versions reach all workers
`broadcast_s` after they were published: side by side, or one at a time (`serial`), the newest next. A worker that dies
is noticed after three beats, and another takes its place `REPLACED_S` later.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from benchmarks.staleness_rules import BEAT_S, Job, Rule, Sample
from swarm.rollout.plane.nodes import MISSED_BEATS

STEP_S = 60.0
"""Virtual seconds of a learner step: what makes hours, and so deaths, of steps."""

NOTICE_S = 0.01
"""The watch of silence is this late."""

CARRIED_S = 1e-9
"""A version that is published while another one arrives is carried next, whichever way their times were rounded."""

REPLACED_S = 600.0
"""A dead worker is replaced after ten minutes: a volunteer comes back, or another one joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Times in learner steps; `generate` is the mean of lognormal lengths with `sigma`. `dying` is the share of the
    workers that vanish per hour."""

    workers: int
    broadcast: float
    generate: float
    sigma: float = 1.0
    group_size: int = 1
    serial: bool = False
    ahead: bool = True
    dying: float = 0.0


@dataclass(slots=True)
class Worker:
    """One life of one worker. `asked_at` is when its open question arrived."""

    name: int
    held: int
    speed: float = 1.0
    running: Job | None = None
    queued: Job | None = None
    asking: bool = False
    asked_at: float = 0.0
    alive: bool = True


@dataclass(slots=True)
class Figures:
    """What a run shows. Idle time counts from the first batch on, `waits_s` has it by batch. Lost samples were on
    workers that died. Held-out samples are counted only here."""

    generated: list[float] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    discarded: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    steps: int = 0
    lost: int = 0
    held_out: int = 0

    @property
    def idle_s(self) -> float:
        return sum(self.waits_s)

    @property
    def idle_share(self) -> float:
        return self.idle_s / max(self.idle_s + self.busy_s, STEP_S)

    @property
    def discarded_share(self) -> float:
        return len(self.discarded) / max(len(self.generated), 1)

    @property
    def mean_staleness(self) -> float:
        return statistics.fmean(self.trained) if self.trained else 0.0


class DeadlockError(RuntimeError):
    """The learner waits, and nothing can happen any more."""


class Run:
    """One learner, one rule, one fleet, until `steps` steps are done or nothing can happen any more."""

    def __init__(self, rule: Rule, fleet: Fleet, *, steps: int, seed: int) -> None:
        self._rule = rule
        self._fleet = fleet
        self._steps = steps
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lengths = Lengths(fleet.sigma, seed, group_size=fleet.group_size)
        self._held_out_lengths = Lengths(fleet.sigma, f"held-out {seed}", group_size=1)
        self._fates = Random(f"deaths {seed}")
        self._workers: dict[int, Worker] = {}
        self._names = itertools.count()
        self._questions: dict[int, Worker] = {}
        self._arrived = 0
        self._published = 0
        self._carrying = False
        self._training = False
        self._waiting_since: float | None = None
        self.figures = Figures()

    def run(self) -> Figures:
        """Everybody holds version 0 at the start."""
        self._rule.published(0)
        self._start()
        while self._events and self.figures.steps < self._steps:
            self._now, _, callback = heapq.heappop(self._events)
            callback()
        if self.figures.steps < self._steps:
            raise DeadlockError(f"nothing can happen any more after {self.figures.steps} steps")
        self.figures.discarded = [sample.length for sample in self._rule.discarded]
        return self.figures

    def _later(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._order), callback))

    # -- workers ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for _ in range(self._fleet.workers):
            self._join()

    def _join(self) -> None:
        worker = self._new()
        self._workers[worker.name] = worker
        if self._fleet.dying:
            self._later(self._fates.expovariate(self._fleet.dying / 3600), lambda: self._die(worker))
        self._ask(worker)
        self._changed()

    def _new(self) -> Worker:
        return Worker(next(self._names), self._arrived)

    def _ask(self, worker: Worker) -> None:
        if not worker.asking and worker.queued is None and (self._fleet.ahead or worker.running is None):
            worker.asking, worker.asked_at = True, self._now
            self._questions[worker.name] = worker

    def _given(self, worker: Worker, job: Job) -> None:
        worker.asking = False
        worker.queued = job
        if worker.alive:
            self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        if worker.running is not None or worker.queued is None:
            return
        job, worker.queued = worker.queued, None
        worker.running, version = job, worker.held
        sample = Sample(self._length(job), version)
        self._later(self._time_s(sample) / worker.speed, lambda: self._finish(worker, job, sample))
        self._ask(worker)

    def _length(self, job: Job) -> float:
        return (self._held_out_lengths if job.held_out else self._lengths).of(job.number, job.index)

    def _time_s(self, sample: Sample) -> float:
        return sample.length * self._fleet.generate * STEP_S

    def _finish(self, worker: Worker, job: Job, sample: Sample) -> None:
        if not worker.alive:
            return
        worker.running, worker.held = None, self._arrived
        self._submit(worker.name, job, sample)
        self._begin(worker)
        self._ask(worker)
        self._changed()

    def _submit(self, worker: int, job: Job, sample: Sample) -> None:
        if job.held_out:
            self.figures.held_out += 1
        else:
            self.figures.generated.append(sample.length)
        self._rule.submit(worker, job, sample, now=self._now)

    def _die(self, worker: Worker) -> None:
        self._vanish(worker)
        self._later(REPLACED_S + self._fleet.broadcast * STEP_S, self._join)

    def _vanish(self, worker: Worker) -> None:
        worker.alive = False
        self._rule.heard(worker.name, now=self._now)
        self._later(MISSED_BEATS * BEAT_S + NOTICE_S, lambda: self._miss(worker))

    def _miss(self, worker: Worker) -> None:
        """Only now does the learner know; until then the question of the dead was open."""
        del self._workers[worker.name]
        self._questions.pop(worker.name, None)
        self.figures.lost += (worker.running is not None) + (worker.queued is not None)
        alive = [one.name for one in self._workers.values() if one.alive]
        self._rule.gone(worker.name, alive, now=self._now)
        self._changed()

    # -- the learner -----------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Go on with what waits for a change: the fastest worker first, then the oldest question. Who is in the same
        case gets the same answer."""
        self._take_if_ready()
        refused: set[tuple[int, bool, float]] = set()
        for worker in sorted(self._questions.values(), key=lambda worker: -worker.speed):
            case = worker.held, worker.running is None, worker.speed
            if case in refused:
                continue
            job = self._rule.ask(worker.name, worker.held, now=worker.asked_at)
            if job is None:
                refused.add(case)
            else:
                del self._questions[worker.name]
                self._given(worker, job)

    def _take_if_ready(self) -> None:
        if self._training:
            return
        batch = self._rule.take(now=self._now)
        if batch is None:
            return
        self.figures.waits_s.append(0.0 if self._waiting_since is None else self._now - self._waiting_since)
        self._waiting_since = None
        self._training = True
        self.figures.trained += [self.figures.steps - sample.version for sample in batch]
        self._later(STEP_S, self._trained)

    def _trained(self) -> None:
        self._training = False
        self._waiting_since = self._now
        self.figures.busy_s += STEP_S
        self.figures.steps += 1
        if self.figures.steps == self._steps:
            return
        self._published = self.figures.steps
        self._rule.published(self._published)
        self._carry()
        self._changed()

    # -- weights ---------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        if self._carrying or self._published == self._arrived:
            return
        self._carrying = self._fleet.serial
        version = self._published
        delay_s = self._fleet.broadcast * STEP_S + (CARRIED_S if self._fleet.serial else 0.0)
        self._later(delay_s, lambda: self._arrive(version))

    def _arrive(self, version: int) -> None:
        self._carrying = False
        self._arrived = version
        for worker in self._workers.values():
            if worker.running is None and worker.alive:
                worker.held = version
        if self._fleet.serial:
            self._carry()
        self._changed()


class Lengths:
    """The length of each sample in mean lengths, the same for every rule and after every death: lognormal, mean 1."""

    def __init__(self, sigma: float, seed: int | str, *, group_size: int) -> None:
        self._sigma = sigma
        self._group_size = group_size
        self._random = Random(f"lengths {seed}")
        self._drawn: list[float] = []

    def of(self, number: int, index: int) -> float:
        """Return the length of sample `index` of group `number`."""
        place = number * self._group_size + index
        while len(self._drawn) <= place:
            self._drawn.append(self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma))
        return self._drawn[place]
