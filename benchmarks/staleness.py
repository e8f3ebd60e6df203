"""What keeping the staleness bound costs: the learner's waiting, and rollouts generated for nothing.

bin/python -m benchmarks.staleness --json
bin/python -m benchmarks.staleness --staleness 2,4 --broadcast 0.3,1 --cases single --seeds 3

In simulation (benchmarks/staleness_sim.py): 32 groups a batch, one-slot workers, lognormal lengths with sigma 1 and a
mean generation time of 0.3 steps; a learner that publishes after every step of 60 s, and versions that reach all
workers `broadcast` steps later. The fleet is 1.3 times as fast as the model's least rate
R / min(T_train, S * T_train - T_bcast - T_gen), or 1.3 * R / T_train where no fleet is fast enough.

Four rules (benchmarks/staleness_rules.py): the real plane with hold 0 and with unlimited hold, each asked one lease
ahead as real samplers do; AReaL's counters; and first in, first out without any pacing, both of which hand out work
only to a worker that is free. Four cases: `single` and `dying` have groups of one (with 10 % of the workers vanishing
per hour, noticed after three beats, replaced after ten minutes), `groups` groups of eight and a fifth of the steps,
`serial` carries one version at a time, so that where a broadcast takes 3 steps only each third version arrives.

Discarded is the share of all generated rollouts that was not trained on and is no longer waiting to be; lost is what
was on workers that died. A row with a target (S >= 2, and T_bcast + T_gen < S * T_train) meets it if hold 0 lets the
learner wait at most 1 % and discards at most a third of what the counters do; without deaths, unlimited hold must
discard nothing in any row. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.staleness_rules import RULES, Setting, freshness_of, hold_of
from benchmarks.staleness_sim import Figures, Fleet, Run

BATCH_GROUPS = 32

TOO_LARGE = 1.3
"""How much faster than necessary the fleet is: what pacing has to hold back."""

DYING_PER_HOUR = 0.1

SIGMA = 1.0

MAX_IDLE = 0.01

OF_COUNTERS = 1 / 3
"""Of what the counters discard, how much the deadlines may."""

GROUP_SIZE = 8

CASES = ("single", "dying", "groups", "serial")

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
        return GROUP_SIZE if self.case == "groups" else 1

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
        return self.case in ("single", "dying") and self.max_staleness >= 2 and self.slack > 0

    @property
    def workers(self) -> int:
        within = min(1.0, self.slack) if self.slack > 0 else 1.0
        return math.ceil(TOO_LARGE * BATCH_GROUPS * self.group_size * self.generate / within)


def simulate(row: Row, rule: str, *, steps: int, seed: int) -> Figures:
    """One run of one rule."""
    setting = Setting(
        max_staleness=row.max_staleness,
        batch_groups=BATCH_GROUPS,
        group_size=row.group_size,
        slots=row.workers,
        hold_s=hold_of(rule),
        freshness=freshness_of(rule),
    )
    fleet = Fleet(
        workers=row.workers,
        broadcast=row.broadcast,
        generate=row.generate,
        sigma=SIGMA,
        serial=row.case == "serial",
        ahead=rule.startswith("deadlines"),
        dying=DYING_PER_HOUR if row.case == "dying" else 0.0,
    )
    steps = max(1, steps // 5) if row.case == "groups" else steps
    return Run(RULES[rule](setting), fleet, steps=steps, seed=seed).run()


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


def misses(row: Row, rules: dict[str, dict[str, Any]]) -> list[str]:
    """Which targets this row misses."""
    missed = []
    ours, held, counter = rules["deadlines"], rules["deadlines, hold"], rules["counter"]
    if row.case != "dying" and held["discarded"] > 0:
        missed.append("hold discards")
    if row.targeted and ours["idle"] > MAX_IDLE:
        missed.append("idle")
    if row.targeted and ours["discarded"] > OF_COUNTERS * counter["discarded"]:
        missed.append("discards")
    return missed


def measure(row: Row, *, steps: int, seeds: int) -> dict[str, Any]:
    rules = {
        rule: summary([simulate(row, rule, steps=steps, seed=seed) for seed in range(1, seeds + 1)]) for rule in RULES
    }
    return {
        "case": row.case,
        "max_staleness": row.max_staleness,
        "broadcast_steps": row.broadcast,
        "workers": row.workers,
        "targeted": row.targeted,
        "missed": misses(row, rules),
        "rules": rules,
    }


def rows_of(options: argparse.Namespace) -> list[Row]:
    """What is asked for; a broadcast of a step is the same if serial, and groups of eight are slow to simulate."""
    return [
        Row(case=case, max_staleness=bound, broadcast=broadcast, generate=options.generate)
        for case in options.cases
        for bound in options.staleness
        for broadcast in options.broadcast
        if not (case == "serial" and broadcast <= 1) and not (case == "groups" and broadcast > 1)
    ]


HEADER = (
    "| case | S | T_bcast | workers | deadlines, hold 0: idle / discarded | by length | staleness "
    "| off: idle / discarded, staleness | unlimited hold | counter | by length | no pacing | target |\n"
    + "|---" * 13
    + "|"
)


def line(found: dict[str, Any]) -> str:
    """One row of the table, in percent."""
    rules = found["rules"]
    ours, off, held, counter, none = (rules[name] for name in RULES)
    verdict = "missed: " + ", ".join(found["missed"]) if found["missed"] else "met" if found["targeted"] else ""
    cells = [
        found["case"],
        found["max_staleness"],
        f"{found['broadcast_steps']:g}",
        found["workers"],
        _shares(ours),
        _quartiles(ours),
        f"{ours['mean_staleness']:.2f}, {ours['max_staleness']}",
        f"{_shares(off)}, {off['mean_staleness']:.2f}",
        _shares(held),
        _shares(counter),
        _quartiles(counter),
        _shares(none),
        verdict,
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _shares(figures: dict[str, Any]) -> str:
    return f"{100 * figures['idle']:.1f} / {100 * figures['discarded']:.1f}"


def _quartiles(figures: dict[str, Any]) -> str:
    return " ".join(f"{100 * share:.1f}" for share in figures["discarded_by_quartile"])


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
    if min(options.steps, options.seeds, options.generate, *options.broadcast) <= 0 or min(options.staleness) < 0:
        parser.error("steps, seeds and times are positive, bounds are not negative")
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"no case is named {unknown[0]!r}")
    return options


def _list(of: type) -> Any:
    return lambda text: [of(one) for one in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    began = time.process_time()
    print(HEADER)
    rows = []
    for row in rows_of(options):
        rows.append(measure(row, steps=options.steps, seeds=options.seeds))
        print(line(rows[-1]), flush=True)
    met = not any(row["missed"] for row in rows)
    cpu_s = time.process_time() - began
    print(f"targets {'met' if met else 'missed'}, {cpu_s:.0f} CPU-s; percent, by length: per quartile, short to long")
    if options.json:
        print(json.dumps({"met": met, "steps": options.steps, "seeds": options.seeds, "cpu_s": cpu_s, "rows": rows}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
