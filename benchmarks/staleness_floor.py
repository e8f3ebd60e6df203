"""The least mean staleness that a schedule can have: a clairvoyant scheduler, run by the same simulator.

Theory of operation. It knows the length of every sample, and that the learner takes batch n exactly n steps after its
first one. So it plans backward: from the last batch to the first, and for each batch from its take back in time, with
what is planned for later batches already on the workers. A sample that begins before version v + 1 arrives is drawn by
v at most, so the arrivals are the boundaries that count. Each sample is aimed behind the latest boundary from which it
can end by the take. The longest is placed first, each on the worker with the most time left there. If not all fit, the
longest are aimed behind the boundary before. It chooses which groups are trained together, and leaves out only groups
that no schedule could train within the bound while the learner never waits.

`least` is a bound below every schedule: each sample alone, begun as late as it may, as if there were a worker for each.
Only foresight can begin the short samples of a group late, so `min_together` is the same bound for schedules that begin
all samples of a group at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count

from benchmarks.staleness_sim import STEP_S, Figures, Fleet, Job, Lengths, Rule, Run, Sample

GAP = 1e-6  # Steps that a sample begins after its version arrived, and ends before its batch is taken
HORIZON = 200  # Steps beyond the last one: a batch halfway there is as far from the start of the run as any


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is scheduled: `steps` batches of `batch_groups`, none older than `max_staleness`."""

    steps: int
    batch_groups: int
    max_staleness: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sample that is to be trained on, and how many steps it takes."""

    time: float
    job: Job


@dataclass(frozen=True, slots=True)
class Planned:
    """A sample of batch `batch` that begins `start` steps after the first batch is taken; negative for the first."""

    start: float
    batch: int
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What the clairvoyant scheduler reached, the bound below any schedule, and the one below any that begins the
    samples of a group together. `left_out` is the share of groups that no schedule can train on."""

    figures: Figures
    least: float
    min_together: float
    left_out: float


class Arrivals:
    """When each version reaches the workers, in steps after the first batch is taken; version 0 was always there."""

    def __init__(self, fleet: Fleet, steps: int) -> None:
        self.times = [-math.inf]
        self.versions = [0]
        sent = 1.0
        while sent <= steps:
            version = math.floor(sent + GAP)
            self.times.append(sent + fleet.broadcast)
            self.versions.append(version)
            sent = max(version + 1.0, self.times[-1]) if fleet.serial else version + 1.0

    def staleness(self, batch: int, start: float) -> int:
        """Return how old a sample of `batch` is that begins at `start`."""
        return batch - self.versions[bisect_right(self.times, start) - 1]

    def before(self, batch: int, max_staleness: int) -> list[float]:
        """Return when the versions arrived that a sample of `batch` may have, newest first."""
        newest = bisect_right(self.times, batch) - 1
        fresh = [i for i in range(newest, -1, -1) if batch - self.versions[i] <= max_staleness]
        return [self.times[i] for i in fresh]


def floor(fleet: Fleet, demand: Demand, *, seed: int) -> Floor:
    """Plan for the lengths of `seed`, and let the simulator run the plan."""
    lengths = Lengths(fleet.sigma, seed, group_size=fleet.group_size)
    groups, passed = _groups(lengths, fleet, demand)
    batches = deal(groups, Arrivals(fleet, demand.steps + HORIZON), fleet, demand)
    arrivals = Arrivals(fleet, demand.steps)
    plan = schedule(batches, arrivals, workers=fleet.workers, max_staleness=demand.max_staleness)
    figures = PlannedRun(plan, fleet, steps=demand.steps, seed=seed).run()
    return Floor(
        figures=figures,
        least=least(batches, arrivals),
        min_together=least([_together(batch) for batch in batches], arrivals),
        left_out=passed / (len(groups) + passed),
    )


def _groups(lengths: Lengths, fleet: Fleet, demand: Demand) -> tuple[list[list[Wanted]], int]:
    """Return the first groups that can be trained on, as many as are needed, and how many were passed over."""
    groups: list[list[Wanted]] = []
    for number in count():
        if len(groups) == demand.steps * demand.batch_groups:
            return groups, number - len(groups)
        jobs = [Job(number=number, index=index) for index in range(fleet.group_size)]
        group = [Wanted(fleet.generate * lengths.of(job.number, job.index), job) for job in jobs]
        if all(math.ceil(one.time + 2 * GAP + fleet.broadcast) <= demand.max_staleness for one in group):
            groups.append(group)
    raise AssertionError


def deal(groups: list[list[Wanted]], arrivals: Arrivals, fleet: Fleet, demand: Demand) -> list[list[Wanted]]:
    """Return the samples of each batch. The longest groups choose first among the batches with room: one in which they
    are hardly older than samples of no length would be; of these, one that has little to generate so far."""
    period = max(1, math.ceil(fleet.broadcast)) if fleet.serial else 1
    like = [demand.steps + HORIZON // 2 // period * period + phase for phase in range(period)]
    open_batches = [[(0.0, n) for n in range(demand.steps) if (n - batch) % period == 0] for batch in like]
    batches: list[list[Wanted]] = [[] for _ in range(demand.steps)]
    for group in sorted(groups, key=lambda group: -sum(one.time for one in group)):
        costs = [_extra(group, batch, arrivals, demand.max_staleness) for batch in like]
        phase = min(
            (phase for phase in range(period) if open_batches[phase]),
            key=lambda phase: (costs[phase], open_batches[phase][0]),
        )
        load, n = heappop(open_batches[phase])
        batches[n] += group
        if len(batches[n]) < demand.batch_groups * fleet.group_size:
            heappush(open_batches[phase], (load + sum(one.time for one in group), n))
    return batches


def _extra(group: Sequence[Wanted], batch: int, arrivals: Arrivals, max_staleness: int) -> float:
    """Return how much older the samples of `group` are in `batch` than samples of no length."""
    ages = [arrivals.staleness(batch, batch - one.time - 2 * GAP) for one in group]
    youngest = arrivals.staleness(batch, batch)
    return sum(age - youngest for age in ages) if max(ages) <= max_staleness else math.inf


def schedule(
    batches: Sequence[Sequence[Wanted]], arrivals: Arrivals, *, workers: int, max_staleness: int
) -> list[Planned]:
    """Return when each sample begins, so that all of batch n end before step n."""
    free_until = [math.inf] * workers
    plan: list[Planned] = []
    for n in reversed(range(len(batches))):
        free_until = [min(n, until) for until in free_until]
        fill = Fill(batches[n], arrivals.before(n, max_staleness), free_until)
        for worker, placed in enumerate(fill.run()):
            for one in placed:
                free_until[worker] -= one.time + 2 * GAP
                plan.append(Planned(free_until[worker] + GAP, n, one.job))
    return sorted(plan, key=lambda one: one.start)


class Fill:
    """The samples of one batch, placed on workers backward from `free_until`. Level i is what begins after
    `boundaries[i]`, newest version first."""

    def __init__(self, batch: Sequence[Wanted], boundaries: Sequence[float], free_until: Sequence[float]) -> None:
        self._batch = sorted(batch, key=lambda one: -one.time)
        self._boundaries = boundaries
        self._free_until = free_until
        take, last = max(free_until), len(boundaries) - 1
        self._level = {
            one.job: next((i for i, at in enumerate(boundaries) if at + one.time + 2 * GAP <= take), last)
            for one in self._batch
        }

    def run(self) -> list[list[Wanted]]:
        """Return each worker's samples, the last one first."""
        while True:
            self._room = [[until - at for at in self._boundaries] for until in self._free_until]
            self._placed: list[list[Wanted]] = [[] for _ in self._free_until]
            left = [one for one in self._batch if not self._place(one)]
            if not left:
                return [sorted(placed, key=lambda one: self._level[one.job]) for placed in self._placed]
            self._age(left)

    def _place(self, one: Wanted) -> bool:
        level, time = self._level[one.job], one.time + 2 * GAP
        most, worker = max((min(room[level:]), worker) for worker, room in enumerate(self._room))
        if most < time:
            return False
        room = self._room[worker]
        room[level:] = [left - time for left in room[level:]]
        self._placed[worker].append(one)
        return True

    def _age(self, left: Sequence[Wanted]) -> None:
        """Aim the longest of the newest level at the one before, until what was `left` would fit."""
        level = self._level[left[0].job]
        if level == len(self._boundaries) - 1:
            raise RuntimeError("no schedule found: the fleet may be too slow for the learner, or the bound too low")
        missing = sum(one.time for one in left)
        for one in self._batch:
            if self._level[one.job] == level and missing > 0:
                self._level[one.job] += 1
                missing -= one.time


def least(batches: Sequence[Sequence[Wanted]], arrivals: Arrivals) -> float:
    """Return a bound below the mean staleness of any schedule of these batches."""
    ages = [arrivals.staleness(n, n - one.time) for n, batch in enumerate(batches) for one in batch]
    return sum(ages) / len(ages)


def _together(batch: Sequence[Wanted]) -> list[Wanted]:
    """Return the samples as if each took as long as the longest of its group."""
    longest: dict[int, float] = {}
    for one in batch:
        longest[one.job.number] = max(one.time, longest.get(one.job.number, 0.0))
    return [replace(one, time=longest[one.job.number]) for one in batch]


class Plan(Rule):
    """The rule that follows a plan: a sample is given out when its time has come (`due`). No worker dies."""

    def __init__(self, plan: Sequence[Planned]) -> None:
        self.due: list[Job] = []
        self.discarded = []
        self.started = False
        self._batch_of = {one.job: one.batch for one in plan}
        self._missing = Counter(one.batch for one in plan)
        self._ready: dict[int, list[Sample]] = {}
        self._next = 0

    def ask(self, worker: int, held: int, *, now: float) -> Job | None:
        return self.due.pop(0) if self.due else None

    def submit(self, worker: int, job: Job, sample: Sample, *, now: float) -> None:
        batch = self._batch_of[job]
        self._missing[batch] -= 1
        self._ready.setdefault(batch, []).append(sample)

    def take(self, *, now: float) -> list[Sample] | None:
        if not self.started or self._missing[self._next]:
            return None
        self._next += 1
        return self._ready.pop(self._next - 1)


class PlannedRun(Run):
    """A run by plan. The first batch is taken at a whole second, so that times are hardly rounded."""

    def __init__(self, plan: Sequence[Planned], fleet: Fleet, *, steps: int, seed: int) -> None:
        self._plan = Plan(plan)
        super().__init__(self._plan, fleet, steps=steps, seed=seed)
        first_take_s = math.ceil(-plan[0].start * STEP_S) + 1.0
        for one in plan:
            self._later(first_take_s + one.start * STEP_S, partial(self._begin_planned, one.job))
        self._later(first_take_s, self._take_first)

    def _begin_planned(self, job: Job) -> None:
        self._plan.due.append(job)
        self._changed()

    def _take_first(self) -> None:
        self._plan.started = True
        self._changed()
