"""What keeping the staleness bound costs: the learner's waiting, and rollouts generated for nothing.

bin/python -m benchmarks.staleness --json
bin/python -m benchmarks.staleness --staleness 2,4 --broadcast 0.3,1 --cases single --seeds 3

In simulation (benchmarks/staleness_sim.py): 32 groups a batch, one-slot workers, lognormal lengths with sigma 1 and a
mean generation time of 0.3 steps; a learner that publishes after every step of 60 s, and versions that reach all
workers `broadcast` steps later. The fleet is 1.3 times as fast as the model's least rate
R / min(T_train, S * T_train - T_bcast - T_gen), or 1.3 * R / T_train where no fleet is fast enough.

Four rules (benchmarks/staleness_sim.py): the real plane with hold 0 and with unlimited hold, each asked one lease
ahead as real samplers do; AReaL's counters; and first in, first out without any pacing, both of which hand out work
only to a worker that is free. Four cases: `single` and `dying` have groups of one (with 10 % of the workers vanishing
per hour, noticed after three beats, replaced after ten minutes), `groups` groups of eight and a fifth of the steps,
`serial` carries one version at a time, so that where a broadcast takes 3 steps only each third version arrives.

Each row is a line of JSON, in shares of 1. Hard cases: benchmarks/staleness_cases.py.

Discarded is the share of all generated rollouts that was not trained on and is no longer waiting to be; lost is what
was on workers that died. The floor (benchmarks/staleness_floor.py) is the mean staleness of a clairvoyant scheduler
that never lets the learner wait, for rows with S >= 2 in which T_bcast + T_gen + kappa - 1 < S steps; for `dying` that
of the fleet without deaths. Targets, of which each row names those that it missed:

- `idle`, `discards`: where S >= 2 and T_bcast + T_gen < S * T_train, single and dying, hold 0 lets the learner wait at
  most 1 % and discards at most a third of what the counters do.
- `hold discards`: without deaths, unlimited hold discards nothing.
- `idle beside off`: the learner waits at most 0.5 % of the time if it waits less than that with freshness off,
  elsewhere at most 0.3 points longer than with freshness off.
- `discards beside off`: at most one point more is discarded than with freshness off.
- `staleness beside floor`: mean staleness is at most 0.3 above the floor where there is one.
- `staleness`: it is at most 2.5 where S is 4 or 8 and T_bcast 0.1 to 1, single and dying.

Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import staleness_cases
from benchmarks.staleness_floor import Demand, Floor, floor
from benchmarks.staleness_sim import RULES, Figures, Fleet, Run, Setting, freshness_of, hold_of

BATCH_GROUPS = 32

TOO_LARGE = 1.3
"""How much faster than necessary the fleet is: what pacing has to hold back."""

DYING_PER_HOUR = 0.1

SIGMA = 1.0

MAX_IDLE = 0.01

OF_COUNTERS = 1 / 3
"""Of what the counters discard, how much the deadlines may."""

ABOVE_FLOOR = 0.3
"""Steps of mean staleness."""

MAX_MEAN_STALENESS = 2.5
"""Where S is 4 or 8 and the broadcast takes 0.1 to 1 steps."""

GROUP_SIZE = 8

CASES = ("single", "dying", "groups", "serial", *staleness_cases.RUNS)

QUARTILES = [math.exp(-SIGMA * SIGMA / 2 + SIGMA * z) for z in (-0.674490, 0.0, 0.674490)]
"""Of lognormal lengths with mean 1."""


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
    def hard(self) -> bool:
        """Whether it is one of benchmarks/staleness_cases.py."""
        return self.case in staleness_cases.RUNS

    @property
    def period(self) -> int:
        """Steps between two versions that arrive (kappa)."""
        return max(1, math.ceil(self.broadcast)) if self.case == "serial" else 1

    @property
    def slack(self) -> float:
        """Steps that a batch's generation may take; none or less if the learner must wait whatever the fleet."""
        return self.max_staleness + 1 - self.period - self.broadcast - self.generate

    @property
    def targeted(self) -> bool:
        return self.case in ("single", "dying") and self.floored

    @property
    def floored(self) -> bool:
        """Whether a fleet of this size can keep a learner busy with what is fresh, so that the floor has a meaning."""
        return self.max_staleness >= 2 and self.slack > 0

    @property
    def young(self) -> bool:
        """Whether the bound is so far away that data as old as that would be out of habit."""
        return self.case in ("single", "dying") and self.max_staleness in (4, 8) and 0.1 <= self.broadcast <= 1

    @property
    def workers(self) -> int:
        within = min(1.0, self.slack) if self.slack > 0 else 1.0
        needed = math.ceil(TOO_LARGE * BATCH_GROUPS * self.group_size * self.generate / within)
        return 2 * needed if self.case == "halved" else needed


def simulate(row: Row, rule: str, *, steps: int, seed: int) -> Figures:
    """One run of one rule."""
    fleet = fleet_of(row, ahead=rule.startswith("deadlines"), dying=DYING_PER_HOUR if row.case == "dying" else 0.0)
    return Run(RULES[rule](setting_of(row, rule)), fleet, steps=steps_of(row, steps), seed=seed).run()


def clairvoyant(row: Row, *, steps: int, seed: int) -> Floor:
    """The floor of `row`, for the same samples."""
    demand = Demand(steps=steps_of(row, steps), batch_groups=BATCH_GROUPS, max_staleness=row.max_staleness)
    return floor(fleet_of(row, ahead=False, dying=0.0), demand, seed=seed)


def setting_of(row: Row, rule: str) -> Setting:
    return Setting(
        max_staleness=row.max_staleness,
        batch_groups=BATCH_GROUPS,
        group_size=row.group_size,
        slots=row.workers,
        hold_s=hold_of(rule),
        freshness=freshness_of(rule),
    )


def fleet_of(row: Row, *, ahead: bool, dying: float) -> Fleet:
    return Fleet(
        workers=row.workers,
        broadcast=row.broadcast,
        generate=row.generate,
        sigma=SIGMA,
        group_size=row.group_size,
        serial=row.case == "serial",
        ahead=ahead,
        dying=dying,
    )


def steps_of(row: Row, steps: int) -> int:
    """Groups of eight are slow to simulate, and hard cases need no more than an event and what follows."""
    return max(1, steps // (5 if row.group_size > 1 else 2 if row.hard else 1))


def summary(runs: Sequence[Figures]) -> dict[str, Any]:
    """Means over seeds, in shares of 1."""
    return {
        "idle": statistics.fmean(run.idle_share for run in runs),
        "discarded": statistics.fmean(run.discarded_share for run in runs),
        "mean_staleness": statistics.fmean(run.mean_staleness for run in runs),
        "max_staleness": max(max(run.trained) for run in runs),
        "discarded_by_quartile": _by_quartile(runs),
        "generated": sum(len(run.generated) for run in runs),
        "lost": sum(run.lost for run in runs),
    }


def _by_quartile(runs: Sequence[Figures]) -> list[float]:
    """Of the generated rollouts of each quartile of length, the share that was discarded."""
    generated = _counts([length for run in runs for length in run.generated])
    discarded = _counts([length for run in runs for length in run.discarded])
    return [lost / max(made, 1) for made, lost in zip(generated, discarded, strict=True)]


def _counts(lengths: Sequence[float]) -> list[int]:
    counts = [0, 0, 0, 0]
    for length in lengths:
        counts[sum(length > bound for bound in QUARTILES)] += 1
    return counts


def floor_summary(floors: Sequence[Floor]) -> dict[str, float]:
    """Means over seeds."""
    return {
        "mean_staleness": statistics.fmean(found.figures.mean_staleness for found in floors),
        "least": statistics.fmean(found.least for found in floors),
        "min_together": statistics.fmean(found.min_together for found in floors),
        "left_out": statistics.fmean(found.left_out for found in floors),
    }


def misses(row: Row, rules: dict[str, dict[str, Any]], lowest: dict[str, float] | None) -> list[str]:
    """Which targets this row misses. `lowest` is its floor, if it has one."""
    ours, off, held, counter = (rules[name] for name in ("deadlines", "deadlines, off", "deadlines, hold", "counter"))
    missed = {
        "hold discards": row.case != "dying" and held["discarded"] > 0,
        "idle": row.targeted and ours["idle"] > MAX_IDLE,
        "discards": row.targeted and ours["discarded"] > OF_COUNTERS * counter["discarded"],
        "staleness beside floor": lowest is not None
        and ours["mean_staleness"] > lowest["mean_staleness"] + ABOVE_FLOOR,
        "staleness": row.young and ours["mean_staleness"] > MAX_MEAN_STALENESS,
    }
    return [*(name for name, is_missed in missed.items() if is_missed), *staleness_cases.beside_off(ours, off)]


def measure(row: Row, *, steps: int, seeds: int) -> dict[str, Any]:
    if row.hard:
        setting, fleet = setting_of(row, "deadlines"), fleet_of(row, ahead=True, dying=0.0)
        return staleness_cases.measure(row.case, setting, fleet, steps=steps_of(row, steps), seeds=seeds)
    which = range(1, seeds + 1)
    rules = {rule: summary([simulate(row, rule, steps=steps, seed=seed) for seed in which]) for rule in RULES}
    lowest = floor_summary([clairvoyant(row, steps=steps, seed=seed) for seed in which]) if row.floored else None
    return {
        "case": row.case,
        "max_staleness": row.max_staleness,
        "broadcast_steps": row.broadcast,
        "workers": row.workers,
        "targeted": row.targeted,
        "missed": misses(row, rules, lowest),
        "floor": lowest,
        "rules": rules,
    }


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
    return [row for row in rows if not row.hard or (row.floored and row.broadcast <= 1)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=350, help="learner steps of a run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row and rule, of which the mean is shown")
    parser.add_argument("--staleness", type=_list(int), default=[0, 1, 2, 4, 8], help="bounds, 0,1,2,4,8")
    parser.add_argument("--broadcast", type=_list(float), default=[0.1, 0.3, 1.0, 3.0], help="in steps, 0.1,0.3,1,3")
    parser.add_argument("--generate", type=float, default=0.3, help="mean generation time in steps")
    parser.add_argument("--cases", type=_list(str), default=list(CASES), help=",".join(CASES))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(arguments)
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"no case is named {unknown[0]!r}")
    return options


def _list(of: type) -> Any:
    return lambda text: [of(one) for one in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    rows = []
    for row in rows_of(options):
        rows.append(measure(row, steps=options.steps, seeds=options.seeds))
        print(json.dumps(rows[-1]), flush=True)
    met = not any(row["missed"] for row in rows)
    if options.json:
        print(json.dumps({"met": met, "steps": options.steps, "seeds": options.seeds, "rows": rows}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
