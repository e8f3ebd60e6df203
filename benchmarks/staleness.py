"""What keeping the staleness bound costs: the learner's waiting, and rollouts generated for nothing.

bin/python -m benchmarks.staleness --json
bin/python -m benchmarks.staleness --staleness 2,4 --broadcast 0.3,1 --cases single

In simulation (staleness_sim.py): 32 groups a batch, one-slot workers, lognormal lengths with sigma 1 and a mean
generation time of 0.3 steps; a learner that publishes after every step of 60 s, and versions that reach all workers
`broadcast` steps later. The fleet is 1.3 times as fast as the model's least rate
R / min(T_train, S * T_train - T_bcast - T_gen), or 1.3 * R / T_train where no fleet is fast enough. Rules: the real
plane, adaptive, off and with unlimited hold, asked one lease ahead as real samplers do. Cases, each row a line of JSON
in shares of 1:

- `single`, `dying`: groups of one; 10 % of the workers vanish per hour, noticed after three beats, replaced after ten
  minutes. `groups`: groups of eight and a fifth of the steps. `serial`: one version is carried at a time.
- `halved`, `doubled`: half of a fleet of twice the size vanishes in the middle, or as many again join. `bursts`: every
  20 steps a held-out round of four batches. `mixed`: speeds of 1 to 50. `places`: four engines that refill each place
  by itself and hold one sample ahead for four places. `lockstep`: one engine with room for 1.3 batches. These compare
  adaptive with off; `recovery_batches` says for how many of the ten batches after an event the learner waited longer
  than with off, by more than 0.5 % of a step.

Each row names the targets that it missed (`misses`, `beside_off`); exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import ended, listed, parser_of, said
from benchmarks import staleness_sim as sim
from benchmarks.staleness_sim import Figures, Fleet, Job, Run, Sample
from swarm.sampler.feeding import AHEAD
from swarm.types import VersionId

STEPS, SEED = 350, 1
BATCH_GROUPS, GROUP_SIZE = 32, 8
TOO_LARGE = 1.3  # How much faster than necessary the fleet is: what pacing has to hold back
DYING_PER_HOUR = 0.1
SIGMA = 1.0
QUARTILES = [math.exp(-SIGMA * SIGMA / 2 + SIGMA * z) for z in (-0.674490, 0.0, 0.674490)]  # Of the lengths, mean 1
MAX_IDLE = 0.01
MAX_MEAN_STALENESS = 2.5  # Where S is 4 or 8 and the broadcast takes 0.1 to 1 steps
IDLE_BESIDE_OFF = 0.005, 0.003  # Allowed where off waits less; elsewhere, what may come on top of that
DISCARDED_BESIDE_OFF = 0.01

HARD = ("halved", "doubled", "bursts", "mixed", "places", "lockstep")
CASES = ("single", "dying", "groups", "serial", *HARD)
PAIR = ("deadlines", "deadlines, off")  # The rules that hard cases compare
APART_S = 0.02  # Samplers that vanish at once do so one after the other: the watch of silence finds one at a time
ROUND_EVERY, ROUND_BATCHES = 20, 4
SPREAD = 50.0
ENGINES = 4
OVERHEAD = 0.02  # Steps that each drawing of an engine in lockstep takes, however few samples it has
AFTER_EVENT, LONGER_SHARE, MAX_RECOVERY = 10, 0.005, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fleet and one bound. Times are in learner steps."""

    case: str
    max_staleness: int
    broadcast: float
    generate: float

    @property
    def group_size(self) -> int:
        return GROUP_SIZE if self.case in ("groups", "places", "lockstep") else 1

    @property
    def named(self) -> dict[str, Any]:
        given = {"max_staleness": self.max_staleness, "broadcast_steps": self.broadcast}
        return {"case": self.case, **given, "workers": self.workers}

    @property
    def hard(self) -> bool:
        return self.case in HARD

    @property
    def slack(self) -> float:
        """Steps that a batch's generation may take; none or less if the learner must wait whatever the fleet."""
        period = max(1, math.ceil(self.broadcast)) if self.case == "serial" else 1  # kappa
        return self.max_staleness + 1 - period - self.broadcast - self.generate

    @property
    def feasible(self) -> bool:
        """Whether a fleet of this size can keep a learner busy with what is fresh."""
        return self.max_staleness >= 2 and self.slack > 0

    @property
    def targeted(self) -> bool:
        return self.case in ("single", "dying") and self.feasible

    @property
    def young(self) -> bool:
        """Whether the bound is so far away that data as old as that would be out of habit."""
        return self.case in ("single", "dying") and self.max_staleness in (4, 8) and 0.1 <= self.broadcast <= 1

    @property
    def workers(self) -> int:
        within = min(1.0, self.slack) if self.slack > 0 else 1.0
        needed = math.ceil(TOO_LARGE * BATCH_GROUPS * self.group_size * self.generate / within)
        return 2 * needed if self.case == "halved" else needed

    def steps(self, steps: int) -> int:
        """Groups of eight are slow to simulate, and hard cases need no more than an event and what follows."""
        return max(1, steps // (5 if self.group_size > 1 else 2 if self.hard else 1))

    @property
    def bounds(self) -> dict[str, int]:
        return {"max_staleness": self.max_staleness, "batch_groups": BATCH_GROUPS, "group_size": self.group_size}

    def fleet(self, *, dying: float = 0.0) -> Fleet:
        return Fleet(
            workers=self.workers,
            broadcast=self.broadcast,
            generate=self.generate,
            sigma=SIGMA,
            group_size=self.group_size,
            serial=self.case == "serial",
            dying=dying,
        )


def simulate(row: Row, rule: str, *, steps: int, seed: int) -> Figures:
    fleet = row.fleet(dying=DYING_PER_HOUR if row.case == "dying" else 0.0)
    return Run(sim.DeadlineRule(rule, **row.bounds), fleet, steps=row.steps(steps), seed=seed).run()


def shares(run: Figures) -> dict[str, float]:
    return {"idle": run.idle_share, "discarded": run.discarded_share, "mean_staleness": run.mean_staleness}


def summary(run: Figures) -> dict[str, Any]:
    generated, discarded = (
        Counter(bisect_left(QUARTILES, length) for length in lengths) for lengths in (run.generated, run.discarded)
    )
    return {
        **shares(run),
        "max_staleness": max(run.trained),
        # Of the generated rollouts of each quartile of length, the share that was discarded.
        "discarded_by_quartile": [discarded[quartile] / max(generated[quartile], 1) for quartile in range(4)],
        "generated": len(run.generated),
        "lost": run.lost,
    }


def misses(row: Row, rules: dict[str, dict[str, Any]]) -> list[str]:
    """Which targets this row misses."""
    ours, off, held = (rules[name] for name in sim.RULES)
    missed = {
        "hold discards": row.case != "dying" and held["discarded"] > 0,
        "idle": row.targeted and ours["idle"] > MAX_IDLE,
        "staleness": row.young and ours["mean_staleness"] > MAX_MEAN_STALENESS,
    }
    return [*(name for name, is_missed in missed.items() if is_missed), *beside_off(ours, off)]


def beside_off(ours: dict[str, Any], off: dict[str, Any]) -> list[str]:
    """Which targets for what the aim may cost are missed."""
    max_idle, more_idle = IDLE_BESIDE_OFF
    missed = {
        "idle beside off": ours["idle"] > (max_idle if off["idle"] < max_idle else off["idle"] + more_idle),
        "discards beside off": ours["discarded"] > off["discarded"] + DISCARDED_BESIDE_OFF,
    }
    return [name for name, is_missed in missed.items() if is_missed]


def measure(row: Row, *, steps: int) -> dict[str, Any]:
    rules = {rule: summary(simulate(row, rule, steps=steps, seed=SEED)) for rule in sim.RULES}
    return {**row.named, "targeted": row.targeted, "missed": misses(row, rules), "rules": rules}


# -- hard cases --------------------------------------------------------------------------------------------------


class CaseRule(sim.DeadlineRule):
    """The real plane; with `round_prompts`, it also begins held-out rounds."""

    def __init__(self, rule: str, *, round_prompts: int = 0, **bounds: int) -> None:
        super().__init__(rule, **bounds)
        self._round_prompts = round_prompts
        self.rounds: list[int] = []

    def published(self, version: int) -> None:
        super().published(version)
        if self._round_prompts and version and version % ROUND_EVERY == 0 and not self._plane.round.open:
            self.rounds.append(version)
            self._plane.evaluate(VersionId(incarnation=0, version=version), [sim.prompt(0)] * self._round_prompts)

    def rate(self, worker: int, tokens_per_s: float, *, now: float) -> None:
        """Hear a worker's own report of its rate."""
        self._plane.beat(sim.node(worker), now=now, tokens_per_s=tokens_per_s)


class CaseRun(Run):
    """A run of the real plane in which the fleet or the work changes."""

    def __init__(self, case: str, rule: CaseRule, fleet: Fleet, *, steps: int, seed: int) -> None:
        super().__init__(rule, fleet, steps=steps, seed=seed)
        self._case, self._case_rule, self._middle = case, rule, steps // 2

    @property
    def events(self) -> Sequence[int]:
        """The steps after which something happened."""
        return [self._middle] if self._case in ("halved", "doubled") else self._case_rule.rounds

    def _trained(self) -> None:
        super()._trained()
        if self.figures.steps != self._middle:
            return
        if self._case == "halved":
            for i, worker in enumerate(list(self._workers.values())[::2]):
                self._later(i * APART_S, partial(self._vanish, worker))
        if self._case == "doubled":
            for _ in range(len(self._workers)):
                self._join()

    def _new(self) -> sim.Worker:
        worker = super()._new()
        if self._case == "mixed":  # Together they are as fast as if all had speed 1.
            speeds = [SPREAD ** ((i + 0.5) / self._fleet.workers) for i in range(self._fleet.workers)]
            worker.speed = speeds[worker.name] / statistics.fmean(speeds)
            self._report_rate(worker.name, worker.speed)
        return worker

    def _report_rate(self, worker: int, speed: float) -> None:
        per_s = speed * sim.MEAN_TOKENS / (self._fleet.generate * sim.STEP_S)
        self._case_rule.rate(worker, per_s, now=self._now)


@dataclass(slots=True)
class Engine:
    """An engine with `places`, whose running samples keep the version of their first token; some are held `ahead`."""

    name: int
    places: int
    ahead: int
    held: int = 0
    running: int = 0
    queued: deque[Job] = field(default_factory=deque)

    @property
    def free(self) -> int:
        return self.places - self.running - len(self.queued)


class PlacesRun(CaseRun):
    """Few engines with many places, as sampler/feeding.py fills them, instead of one-slot workers."""

    def __init__(self, case: str, rule: CaseRule, fleet: Fleet, *, steps: int, seed: int) -> None:
        super().__init__(case, rule, fleet, steps=steps, seed=seed)
        places = -(-fleet.workers // ENGINES)
        self._engines = [Engine(i, places, -(-places // AHEAD)) for i in range(ENGINES)]

    def _start(self) -> None:
        for engine in self._engines:
            self._report_rate(engine.name, 1.0)
        self._changed()

    def _changed(self) -> None:
        self._take_if_ready()
        for engine in self._engines:
            while 2 * (engine.free + engine.ahead) >= engine.ahead and self._fill(engine):
                pass

    def _fill(self, engine: Engine) -> int:
        missing, at_once = engine.free + engine.ahead, max(0, engine.free)
        jobs = self._case_rule.ask_many(engine.name, engine.held, missing, at_once=at_once, now=self._now)
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

    def __init__(self, case: str, rule: CaseRule, fleet: Fleet, *, steps: int, seed: int) -> None:
        super().__init__(case, rule, fleet, steps=steps, seed=seed)
        self._places = round(fleet.workers / fleet.generate)
        self._sample_s = sim.STEP_S * fleet.generate / fleet.workers
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
        took_s = OVERHEAD * sim.STEP_S + len(self._running) * self._sample_s
        self._later(took_s, partial(self._drawn, took_s, self._held))
        self._later(0.0, self._changed)

    def _drawn(self, took_s: float, version: int) -> None:
        jobs, self._running, self._held = self._running, [], self._arrived
        self._case_rule.rate(0, sim.MEAN_TOKENS / took_s, now=self._now)
        self._draw()
        for job in jobs:
            self._submit(0, job, Sample(1.0, version))
        self._changed()

    def _arrive(self, version: int) -> None:
        if not self._running:
            self._held = version
        super()._arrive(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of one rule; `figures` is None if learner and samplers waited for one another."""

    figures: Figures | None
    events: Sequence[int]


def simulate_case(row: Row, rule: str, *, steps: int) -> Outcome:
    plane = CaseRule(rule, **row.bounds, round_prompts=ROUND_BATCHES * BATCH_GROUPS if row.case == "bursts" else 0)
    kind = {"places": PlacesRun, "lockstep": LockstepRun}.get(row.case, CaseRun)
    run = kind(row.case, plane, row.fleet(), steps=row.steps(steps), seed=SEED)
    try:
        figures = run.run()
    except sim.DeadlockError:
        return Outcome(figures=None, events=run.events)
    return Outcome(figures=figures, events=run.events)


def recovery(ours: Sequence[float], off: Sequence[float], event: int) -> int:
    """Return for how many of the batches after step `event` the learner waited longer than with freshness off. `ours`
    and `off` are the waits for each batch, in seconds."""
    after = slice(event, event + AFTER_EVENT)
    return sum(one > other + LONGER_SHARE * sim.STEP_S for one, other in zip(ours[after], off[after], strict=True))


def measure_case(row: Row, *, steps: int) -> dict[str, Any]:
    """Run both rules. `recovery_batches` is of the event after which it took longest."""
    ours, off = (simulate_case(row, rule, steps=steps) for rule in PAIR)
    slowest, missed = None, ["deadlock"]
    if ours.figures and off.figures:
        waits = ours.figures.waits_s, off.figures.waits_s
        slowest = max((recovery(*waits, event) for event in ours.events), default=None)
        is_slow = slowest is not None and slowest > MAX_RECOVERY
        missed = [*["recovery"] * is_slow, *beside_off(shares(ours.figures), shares(off.figures))]
    rules = {rule: shares(one.figures) if one.figures else None for rule, one in zip(PAIR, (ours, off), strict=True)}
    return {**row.named, "recovery_batches": slowest, "missed": missed, "rules": rules}


# -- the command -------------------------------------------------------------------------------------------------


def rows_of(options: argparse.Namespace) -> list[Row]:
    """What is asked for; a broadcast of a step is the same if serial, groups of eight are slow to simulate, and hard
    cases are for where the fleet is fast enough."""
    rows = [
        Row(case=case, max_staleness=bound, broadcast=broadcast, generate=options.generate)
        for case in options.cases
        for bound in options.staleness
        for broadcast in options.broadcast
        if not (case == "serial" and broadcast <= 1) and not (case == "groups" and broadcast > 1)
    ]
    return [row for row in rows if not row.hard or (row.feasible and row.broadcast <= 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--staleness", type=listed(int), default=[0, 1, 2, 4, 8], help="bounds, 0,1,2,4,8")
    parser.add_argument("--broadcast", type=listed(float), default=[0.1, 0.3, 1.0, 3.0], help="in steps, 0.1,0.3,1,3")
    parser.add_argument("--generate", type=float, default=0.3, help="mean generation time in steps")
    parser.add_argument("--cases", type=listed(str), default=list(CASES), help=",".join(CASES))
    options = parser.parse_args(arguments)
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"no case is named {unknown[0]!r}")
    rows = [said((measure_case if row.hard else measure)(row, steps=STEPS)) for row in rows_of(options)]
    met = not any(row["missed"] for row in rows)
    return ended(options, {"met": met, "rows": rows}, met=met)


if __name__ == "__main__":
    sys.exit(main())
