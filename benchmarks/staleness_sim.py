"""The real rollout plane and a fleet of one-slot workers on a virtual clock, for benchmarks/staleness.py.

Theory of operation. Times are in seconds, a learner step takes STEP_S. A worker generates one sample at a time, with
the newest version that had reached it when it began, and asks for its next sample when it begins one. A question that
finds nothing stays with the learner and is tried again at every change. Versions reach all workers `broadcast` steps
after they were published: side by side, or one at a time (`serial`), the newest next. A worker that dies is noticed
after three beats, and another takes its place `REPLACED_S` later. What is older than S steps when a batch is taken is
never trained on.
"""

from __future__ import annotations

import itertools
import statistics
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from random import Random

from benchmarks.holding import HoldingPlane
from swarm.plan.simulate.world import World
from swarm.rollout.journal.entries import GroupDropped
from swarm.rollout.messages import Answer
from swarm.rollout.plane.effects import Effect, Granted, Judged, NodeSilent, Refused, ScoreWanted
from swarm.rollout.plane.nodes import MISSED_BEATS
from swarm.rollout.plane.plane import PlaneRules
from swarm.types import Lease, NodeId, Prompt, Rollout, SamplingRules, Score, Span, VersionId

MEAN_TOKENS = 16  # Tokens of a completion of mean length: the plane sees lengths, and a run stays cheap
MAX_TOKENS = 4096  # The token limit: 256 times the mean, which no length of a benchmark reaches
BEAT_S = 5.0  # The default of a real run; a sampler counts as gone after three
SCORE = Score(reward=0.0, exact=False)
STEP_S = 60.0  # Virtual seconds of a learner step: what makes hours, and so deaths, of steps
NOTICE_S = 0.01  # The watch of silence is this late
CARRIED_S = 1e-9  # Whichever way times were rounded, what is published while another one arrives is carried next
REPLACED_S = 600.0  # A dead worker is replaced after ten minutes: a volunteer comes back, or another one joins


# -- rules -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sample of one group, given to a worker. `lease` is the plane's."""

    number: int
    index: int
    lease: Lease | None = None

    @property
    def held_out(self) -> bool:
        return self.lease is not None and self.lease.purpose == "eval"


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished sample: its length in mean lengths, and the version that drew it."""

    length: float
    version: int


class DeadlineRule:
    """The real plane, asked as its real shell asks it. `discarded` collects what was generated and will not be trained
    on."""

    def __init__(self, rule: str, *, max_staleness: int, batch_groups: int, group_size: int) -> None:
        rules = PlaneRules(
            run_seed=0,
            max_staleness=max_staleness,
            adaptive=rule == RULES[0],
            groups_per_step=batch_groups,
            group_size=group_size,
            rules=SamplingRules(temperature=1.0, max_new_tokens=MAX_TOKENS, stop_token_ids=(2,)),
            vocab_size=10,
            beat_s=BEAT_S,
            lease_time_limit_s=1e7,
        )
        self._plane = HoldingPlane(rules, prompts=prompt, patient=rule == RULES[2])
        self._samples: dict[int, list[Sample]] = {}
        self.discarded: list[Sample] = []

    def ask(self, worker: int, held: int, *, now: float) -> Job | None:
        """A sample for a worker that holds `held` and asked at `now`, or None while there is none for such a worker."""
        jobs = self.ask_many(worker, held, 1, at_once=0, now=now)
        return jobs[0] if jobs else None

    def ask_many(self, worker: int, held: int, capacity: int, *, at_once: int, now: float) -> list[Job]:
        """Up to `capacity` samples for an engine that can begin `at_once` of them now."""
        version = VersionId(incarnation=0, version=held)
        answer = self._plane.ask(node(worker), version, capacity, now=now, at_once=at_once)[-1]
        if isinstance(answer, Refused):
            return []
        assert isinstance(answer, Granted)
        return [
            Job(number=_number(lease), index=sample.index, lease=lease)
            for lease in answer.leases
            for sample in lease.samples
        ]

    def submit(self, worker: int, job: Job, sample: Sample, *, now: float) -> None:
        assert job.lease is not None
        rollout = _rollout(job, sample)
        (judged, *rest) = self._plane.submit(node(worker), Answer(rollout), now=now)
        assert isinstance(judged, Judged)
        if judged.verdict == "accepted" and not job.held_out:
            self._samples.setdefault(job.number, []).append(sample)
        elif judged.verdict != "accepted":
            assert judged.verdict in ("stale", "duplicate"), judged
            self.discarded.append(sample)
        self._perform(rest)

    def published(self, version: int) -> None:
        self._plane.published(VersionId(incarnation=0, version=version))

    def take(self, *, now: float) -> list[Sample] | None:
        if not self._plane.can_take(now=now):
            return None
        batch, effects = self._plane.take()
        self._perform(effects)
        return [sample for group in batch for sample in self._samples.pop(group.order)]

    def heard(self, worker: int, *, now: float) -> None:
        self._plane.beat(node(worker), now=now)

    def gone(self, worker: int, alive: Collection[int], *, now: float) -> None:
        for one in alive:
            self._plane.beat(node(one), now=now)
        silent = [effect.node for effect in self._plane.tick(now=now) if isinstance(effect, NodeSilent)]
        assert silent == [node(worker)]

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ScoreWanted():
                    self._perform(self._plane.scored(effect.group_id, effect.index, SCORE))
                case GroupDropped():
                    assert effect.number is not None
                    dropped = self._samples.pop(effect.number, [])
                    assert len(dropped) == effect.rollouts
                    self.discarded += dropped
                case _:
                    pass


RULES = ("deadlines", "deadlines, off", "deadlines, hold")


@cache
def node(worker: int) -> NodeId:
    return NodeId(f"w{worker}")


@cache
def prompt(_: int) -> Prompt:
    return Prompt(prompt_id="p", text="", answer="", token_ids=(1,))


def _number(lease: Lease) -> int:
    """The number of a group, or of a held-out prompt within its round."""
    return int(lease.group_id[1:].rpartition("-")[2])


def _rollout(job: Job, sample: Sample) -> Rollout:
    assert job.lease is not None
    tokens, logprobs = _payload(max(1, min(MAX_TOKENS, round(sample.length * MEAN_TOKENS))))
    version = VersionId(incarnation=0, version=sample.version)
    return Rollout(
        group_id=job.lease.group_id,
        index=job.index,
        token_ids=tokens,
        logprobs=logprobs,
        spans=(Span(version=version, start=0, end=len(tokens) // 4),),
        finish="stop",
    )


@cache
def _payload(length: int) -> tuple[bytes, bytes]:
    ids = array("i", [*([5] * (length - 1)), 2])
    return ids.tobytes(), array("f", [-0.5] * length).tobytes()


# -- the run -----------------------------------------------------------------------------------------------------


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

    def __init__(self, rule: DeadlineRule, fleet: Fleet, *, steps: int, seed: int) -> None:
        self._rule = rule
        self._fleet = fleet
        self._steps = steps
        self._world = World(Random(0))
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
        self._world.run_until(lambda: self.figures.steps >= self._steps)
        if self.figures.steps < self._steps:
            raise DeadlockError(f"nothing can happen any more after {self.figures.steps} steps")
        self.figures.discarded = [sample.length for sample in self._rule.discarded]
        return self.figures

    @property
    def _now(self) -> float:
        return self._world.now

    def _later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._world.schedule(delay_s, "", callback)

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
        if not worker.asking and worker.queued is None:
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
        place = number * self._group_size + index
        while len(self._drawn) <= place:
            self._drawn.append(self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma))
        return self._drawn[place]
