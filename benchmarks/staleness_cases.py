"""Hard cases of pacing, for benchmarks/staleness.py: what the aim costs where the fleet or the work changes at once.

Each is run by the real plane with freshness adaptive and off, in the simulator of the other cases, for groups of one
(`places`: of eight) and a fleet 1.3 times as fast as needed unless it says otherwise.

- `halved`: 2.6 times as fast as needed, until half of the samplers vanish in the middle of the run. The learner notices
  after three beats; they are not replaced.
- `doubled`: in the middle of the run as many samplers again join, with the newest version.
- `bursts`: every 20 steps a held-out round of as many prompts as four batches have.
- `mixed`: the fastest sampler is 50 times as fast as the slowest, log-uniform, with the same rate in all.
- `places`: four engines that refill each place by itself, hold one sample ahead for four places and install a version
  while they generate, as sampler/feeding.py does. Their questions always say what is true at that moment.
- `lockstep`: one engine with room for 1.3 batches, which draws all that it was given together, holds as much ahead, and
  installs between two. A drawing takes 0.02 steps and 1 / 1.3 steps for each batch in it. Groups of eight.

In `mixed`, `places` and `lockstep` samplers report their rates. `recovery` says for how many of the ten batches after
an event (in `bursts`: after the beginning of a round, the worst of all rounds) the learner waited longer than with
freshness off, by more than 0.5 % of a step. Targets: no deadlock, a recovery of at most three batches, and idle time
and discards beside those with freshness off as in benchmarks/staleness.py.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.staleness_sim import (
    MEAN_TOKENS,
    STEP_S,
    DeadlineRule,
    DeadlockError,
    Figures,
    Fleet,
    Job,
    Run,
    Sample,
    Setting,
    Worker,
    freshness_of,
    node,
    prompt,
)
from swarm.sampler.feeding import AHEAD
from swarm.types import VersionId

RULES = ("deadlines", "deadlines, off")

EVENT_SHARE = 0.5
"""The fleet changes after this share of the steps."""

APART_S = 0.02
"""Samplers that vanish at once do so one after the other: the watch of silence finds one at a time."""

ROUND_EVERY = 20

ROUND_BATCHES = 4

SPREAD = 50.0

ENGINES = 4

OVERHEAD = 0.02
"""Steps that each drawing of an engine in lockstep takes, however few samples it has."""

IDLE_BESIDE_OFF = 0.005, 0.003
"""What the learner may wait where it waits less with freshness off; elsewhere, what it may wait beyond that."""

DISCARDED_BESIDE_OFF = 0.01

AFTER_EVENT = 10
"""Batches after an event that are looked at."""

LONGER_SHARE = 0.005
"""Waits that differ by less than this share of a step are alike."""

MAX_RECOVERY = 3


class CaseRule(DeadlineRule):
    """The real plane; with `round_prompts`, it also begins held-out rounds."""

    def __init__(self, setting: Setting, *, round_prompts: int = 0) -> None:
        super().__init__(setting)
        self._round_prompts = round_prompts
        self.rounds: list[int] = []

    def published(self, version: int) -> None:
        super().published(version)
        if self._round_prompts and version and version % ROUND_EVERY == 0 and not self._plane.round.open:
            self.rounds.append(version)
            self._plane.evaluate(VersionId(incarnation=0, version=version), [prompt(0)] * self._round_prompts)

    def rate(self, worker: int, tokens_per_s: float, *, now: float) -> None:
        """Hear a worker's own report of its rate."""
        self._plane.beat(node(worker), now=now, tokens_per_s=tokens_per_s)


class CaseRun(Run):
    """A run of the real plane. `events` are the steps after which something happened: here, a round began."""

    def __init__(self, rule: CaseRule, fleet: Fleet, *, steps: int, seed: int) -> None:
        super().__init__(rule, fleet, steps=steps, seed=seed)
        self._case_rule = rule
        self._event_at = math.floor(EVENT_SHARE * steps)

    @property
    def events(self) -> Sequence[int]:
        return self._case_rule.rounds

    def _report_rate(self, worker: int, speed: float) -> None:
        per_s = speed * MEAN_TOKENS / (self._fleet.generate * STEP_S)
        self._case_rule.rate(worker, per_s, now=self._now)


class ChangingRun(CaseRun):
    """Something happens to the fleet half-way."""

    @property
    def events(self) -> Sequence[int]:
        return [self._event_at]

    def _trained(self) -> None:
        super()._trained()
        if self.figures.steps == self._event_at:
            self._change()

    def _change(self) -> None:
        raise NotImplementedError


class HalvedRun(ChangingRun):
    """Every second worker vanishes."""

    def _change(self) -> None:
        for i, worker in enumerate(list(self._workers.values())[::2]):
            self._later(i * APART_S, partial(self._vanish, worker))


class DoubledRun(ChangingRun):
    """As many workers again join."""

    def _change(self) -> None:
        for _ in range(len(self._workers)):
            self._join()


class MixedRun(CaseRun):
    """Workers of all speeds between 1 and SPREAD, in proportion; together as fast as if all had speed 1."""

    def _new(self) -> Worker:
        worker = super()._new()
        speeds = [SPREAD ** ((i + 0.5) / self._fleet.workers) for i in range(self._fleet.workers)]
        worker.speed = speeds[worker.name] / statistics.fmean(speeds)
        self._report_rate(worker.name, worker.speed)
        return worker


@dataclass(slots=True)
class Engine:
    """An engine with `places`, whose running samples keep the version of their first token."""

    name: int
    places: int
    held: int = 0
    running: int = 0
    queued: deque[Job] = field(default_factory=deque)

    @property
    def ahead(self) -> int:
        return -(-self.places // AHEAD)

    @property
    def missing(self) -> int:
        return self.places + self.ahead - self.running - len(self.queued)

    @property
    def at_once(self) -> int:
        return max(0, self.places - self.running - len(self.queued))


class PlacesRun(CaseRun):
    """Few engines with many places instead of one-slot workers."""

    def __init__(self, rule: CaseRule, fleet: Fleet, *, steps: int, seed: int) -> None:
        super().__init__(rule, fleet, steps=steps, seed=seed)
        self._engines = [Engine(i, -(-fleet.workers // ENGINES)) for i in range(ENGINES)]

    def _start(self) -> None:
        for engine in self._engines:
            self._report_rate(engine.name, 1.0)
        self._changed()

    def _changed(self) -> None:
        self._take_if_ready()
        for engine in self._engines:
            while 2 * engine.missing >= engine.ahead and self._fill(engine):
                pass

    def _fill(self, engine: Engine) -> int:
        jobs = self._case_rule.ask_many(engine.name, engine.held, engine.missing, at_once=engine.at_once, now=self._now)
        engine.queued.extend(jobs)
        self._refill(engine)
        return len(jobs)

    def _refill(self, engine: Engine) -> None:
        while engine.queued and engine.running < engine.places:
            job = engine.queued.popleft()
            sample = Sample(self._length(job), engine.held)
            engine.running += 1
            self._later(self._time_s(sample), partial(self._end, engine, job, sample))

    def _end(self, engine: Engine, job: Job, sample: Sample) -> None:
        engine.running -= 1
        self._submit(engine.name, job, sample)
        self._refill(engine)
        self._changed()

    def _arrive(self, version: int) -> None:
        for engine in self._engines:
            engine.held = version
        super()._arrive(version)


class LockstepRun(CaseRun):
    """One engine that draws all that it was given together, in a time that grows with their number."""

    def __init__(self, rule: CaseRule, fleet: Fleet, *, steps: int, seed: int) -> None:
        super().__init__(rule, fleet, steps=steps, seed=seed)
        self._places = round(fleet.workers / fleet.generate)
        self._sample_s = STEP_S * fleet.generate / fleet.workers
        self._held = 0
        self._running: list[Job] = []
        self._next: list[Job] = []

    def _start(self) -> None:
        self._changed()

    def _changed(self) -> None:
        self._take_if_ready()
        if not self._next:
            self._next = self._case_rule.ask_many(0, self._held, self._places, at_once=0, now=self._now)
            self._draw()

    def _draw(self) -> None:
        if self._running or not self._next:
            return
        self._running, self._next = self._next, []
        took_s = OVERHEAD * STEP_S + len(self._running) * self._sample_s
        self._later(took_s, partial(self._drawn, took_s, self._held))
        self._later(0.0, self._changed)

    def _drawn(self, took_s: float, version: int) -> None:
        jobs, self._running, self._held = self._running, [], self._arrived
        self._case_rule.rate(0, MEAN_TOKENS / took_s, now=self._now)
        self._draw()
        for job in jobs:
            self._submit(0, job, Sample(1.0, version))
        self._changed()

    def _arrive(self, version: int) -> None:
        if not self._running:
            self._held = version
        super()._arrive(version)


RUNS: dict[str, type[CaseRun]] = {
    "halved": HalvedRun,
    "doubled": DoubledRun,
    "bursts": CaseRun,
    "mixed": MixedRun,
    "places": PlacesRun,
    "lockstep": LockstepRun,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of one rule; `figures` is None if learner and samplers waited for one another."""

    figures: Figures | None
    events: Sequence[int]


def simulate(case: str, setting: Setting, fleet: Fleet, *, steps: int, seed: int) -> Outcome:
    """Run a case. Of `halved`, `fleet` is the one before."""
    prompts = ROUND_BATCHES * setting.batch_groups if case == "bursts" else 0
    run = RUNS[case](CaseRule(setting, round_prompts=prompts), fleet, steps=steps, seed=seed)
    try:
        figures = run.run()
    except DeadlockError:
        return Outcome(figures=None, events=run.events)
    return Outcome(figures=figures, events=run.events)


def recovery(ours: Sequence[float], off: Sequence[float], event: int) -> int:
    """Return for how many of the batches after step `event` the learner waited longer than with freshness off. `ours`
    and `off` are the waits for each batch, in seconds."""
    after = slice(event, event + AFTER_EVENT)
    return sum(one > other + LONGER_SHARE * STEP_S for one, other in zip(ours[after], off[after], strict=True))


def measure(case: str, setting: Setting, fleet: Fleet, *, steps: int, seeds: int) -> dict[str, Any]:
    """Run both rules on each seed. Figures are means over seeds, `recovery` is the slowest of all."""
    runs = {
        rule: [
            simulate(case, replace(setting, freshness=freshness_of(rule)), fleet, steps=steps, seed=seed)
            for seed in range(1, seeds + 1)
        ]
        for rule in RULES
    }
    ours, off = (runs[rule] for rule in RULES)
    slowest = max(
        (
            recovery(one.figures.waits_s, other.figures.waits_s, event)
            for one, other in zip(ours, off, strict=True)
            if one.figures and other.figures
            for event in one.events
        ),
        default=None,
    )
    rules = {rule: _summary([run.figures for run in runs[rule] if run.figures]) for rule in RULES}
    deadlocks = sum(run.figures is None for run in [*ours, *off])
    return {
        "case": case,
        "max_staleness": setting.max_staleness,
        "broadcast_steps": fleet.broadcast,
        "workers": fleet.workers,
        "recovery_batches": slowest,
        "missed": misses(rules, deadlocks, slowest),
        "rules": rules,
    }


def _summary(runs: Sequence[Figures]) -> dict[str, float] | None:
    """Means over seeds; None if all runs ended in a deadlock."""
    if not runs:
        return None
    return {
        "idle": statistics.fmean(run.idle_share for run in runs),
        "discarded": statistics.fmean(run.discarded_share for run in runs),
        "mean_staleness": statistics.fmean(run.mean_staleness for run in runs),
    }


def misses(rules: Mapping[str, dict[str, float] | None], deadlocks: int, slowest: int | None) -> list[str]:
    """Which targets a case misses."""
    ours, off = (rules[rule] for rule in RULES)
    if deadlocks or ours is None or off is None:
        return ["deadlock"]
    is_slow = slowest is not None and slowest > MAX_RECOVERY
    return [*(["recovery"] if is_slow else []), *beside_off(ours, off)]


def beside_off(ours: dict[str, Any], off: dict[str, Any]) -> list[str]:
    """Which targets for what the aim may cost are missed."""
    max_idle, more_idle = IDLE_BESIDE_OFF
    missed = {
        "idle beside off": ours["idle"] > (max_idle if off["idle"] < max_idle else off["idle"] + more_idle),
        "discards beside off": ours["discarded"] > off["discarded"] + DISCARDED_BESIDE_OFF,
    }
    return [name for name, is_missed in missed.items() if is_missed]
