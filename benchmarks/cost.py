"""What a step costs in the scenarios of examples/, planned and simulated, against two centralised baselines.

bin/python -m benchmarks.cost --json
bin/python -m benchmarks.cost --scenarios lab-4b --hours 6
bin/python -m benchmarks.cost --scenarios volunteers-8b-fp8,internet-32b-fp8 --json

Without --scenarios, those with bf16 weights: lab-4b, volunteers-8b, internet-32b. The scenarios named -fp8 have the
rates of rounded weights, which no GPU has drawn with in echo-node, and internet-32b-fp8 those of fp8 caches, which it
does not offer.

Arms: full versions or deltas, by relay or from the learner alone (star), all samplers active or the cheapest set. Every
arm has the settings that `plan` chooses for it among the bounds in the file; of full weights also those with S <= 6.
Costs are compared at equal utilisation of the learner: sets are chosen for a predicted idle share of at most 2 %. An
arm that cannot reach it is charged its stretched step, learner included, and is marked.

Baselines, by the arithmetic of swarm/capacity/plan/plan.py: `colocated`, one machine that generates, switches and
trains in turn; `async_dc`, whole data-centre GPUs beside a learner that is taken never to wait.

The simulation is swarm/sim/capacity_swarm: real plane, planner, estimator, activation and cost book on a virtual clock,
links drawn, churn and correlated departures as in the file. The chosen arm (relay, deltas, cheapest) runs for 14
virtual hours, the others for 4 or 8; figures are of what follows the warm-up, whose extra cost is given apart. A plan
is confirmed if its saving is within 3 points of the simulated one; so is a figure by hand, against the simulation or
else the plan.

Exit status 1 if the chosen arm, simulated, saves less than 33.3 % against `colocated` or leaves the learner idle for
more than 3 %, in any scenario.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cost_prices import CASES, Held, data_centre_factor, edge_factor, generation_factor, held_in
from benchmarks.cost_rows import HOURS, LONG_HOURS, RUNNABLE, TARGET_SAVING, Row, async_idle, rows_of
from swarm.capacity.model import NEARLY_BUSY
from swarm.capacity.plan.arms import Arm
from swarm.capacity.plan.plan import Reference, references_of
from swarm.capacity.plan.scenario import Scenario
from swarm.settings_file import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"

HEADER = (
    "| scenario | arm | active | S, every | idle %: plan, simulated | cost per step: plan, simulated "
    "| saving % against co-located, data centre: plan | simulated | by hand | plan is | by hand is |\n"
    + "|---" * 11
    + "|"
)


def line(row: Row) -> str:
    """One row of the table. A star: the learner waits, and its stretched step is charged."""
    arm, found = row.plan, row.measured
    cells = [
        row.scenario,
        f"{row.name}, {arm.activate}{'' if row.is_equal else ' *'}",
        f"{len(arm.active)}" + (f", {found.active:.0f}" if found else ""),
        f"{arm.max_staleness}, {arm.publish_every_steps}",
        f"{100 * arm.idle_share:.1f}" + (f", {100 * found.idle_share:.1f} in {found.hours:.0f} h" if found else ""),
        f"{arm.cost_per_step:.3f}" + (f", {found.cost_per_step:.3f}" if found else ""),
        points(row.plan_saving),
        points(row.measured_saving),
        points(row.hand),
        row.plan_verdict,
        row.hand_verdict,
    ]
    return "| " + " | ".join(cells) + " |"


def points(shares: tuple[float, float] | None) -> str:
    return "" if shares is None else ", ".join(f"{100 * share:.1f}" for share in shares)


def reference_line(scenario: str, reference: Reference, idle: float | None) -> str:
    busy = "" if idle is None else f"0.0, {100 * idle:.1f}"
    cells = [
        scenario,
        f"baseline {reference.name}",
        f"{reference.gpus} GPUs",
        "",
        busy,
        f"{reference.cost_per_step:.3f}",
    ]
    return "| " + " | ".join(cells) + " |" * 5


def held_lines(held: dict[str, list[Held]]) -> Iterator[str]:
    """The sensitivity: saving against co-located / data centre, and the bound that the plan then chooses."""
    yield "| changed | arm | " + " | ".join(held) + " |"
    yield "|---" * (2 + len(held)) + "|"
    for cases in zip(*held.values(), strict=True):
        cells = [
            f"{' / '.join(f'{100 * share:.0f}' for share in one.saving.values())} (S {one.max_staleness}"
            + (f", idle {100 * one.idle_share:.0f} %)" if one.idle_share > NEARLY_BUSY else ")")
            for one in cases
        ]
        yield f"| {cases[0].label} | {cases[0].arm} | " + " | ".join(cells) + " |"


def limits_of(scenario: Scenario, arm: Arm) -> dict[str, dict[str, float]]:
    """How far prices may move until the arm saves 33.3 %, and nothing, against `colocated`."""
    colocated = scenario.baseline.colocated
    assert colocated is not None
    return {
        name: {
            "edge_price_at_most": edge_factor(arm, colocated, least),
            "colocated_generation_at_least": generation_factor(arm, colocated, least),
            "data_centre_price_at_least": data_centre_factor(arm, colocated, least),
        }
        for name, least in (("target", TARGET_SAVING), ("nothing", 0.0))
    }


def as_object(row: Row) -> dict[str, Any]:
    """For --json, without the names of samplers."""
    plan = asdict(row.plan)
    del plan["active"]
    return {
        "scenario": row.scenario,
        "arm": row.name,
        "activate": row.plan.activate,
        "equal_utilisation": row.is_equal,
        "plan": plan | {"workers": len(row.plan.active)},
        "plan_saving": row.plan_saving,
        "simulated": None if row.measured is None else asdict(row.measured),
        "simulated_saving": row.measured_saving,
        "hand_saving": row.hand,
        "plan_is": row.plan_verdict,
        "hand_is": row.hand_verdict,
    }


def finite(value: Any) -> Any:
    """JSON has no infinities: null stands for a step that never comes."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", default=",".join(RUNNABLE), help=f"of examples/: {', '.join(HOURS)}")
    parser.add_argument(
        "--hours", type=float, default=LONG_HOURS, help="most virtual hours of any simulation; 0 for none"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(arguments)
    options.scenarios = options.scenarios.split(",")
    unknown = [name for name in options.scenarios if name not in HOURS]
    if unknown:
        parser.error(f"no scenario is named {unknown[0]}: {', '.join(HOURS)}")
    if not 0 <= options.hours <= LONG_HOURS:
        parser.error(f"--hours {options.hours:g}: from 0 to {LONG_HOURS:g}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    began = time.process_time()
    scenarios = [load_file(Scenario, EXAMPLES / f"{name}.toml") for name in options.scenarios]
    rows: list[Row] = []
    asynchronous: dict[str, float] = {}
    print(HEADER)
    for scenario in scenarios:
        name = scenario.scenario.name
        for row in rows_of(scenario, max_hours=options.hours, seed=options.seed):
            rows.append(row)
            print(line(row), flush=True)
        colocated, async_dc = references_of(scenario)
        asynchronous[name] = async_idle(scenario, async_dc, rows[-1].plan.max_staleness, seed=options.seed)
        print(reference_line(name, colocated, None))
        print(reference_line(name, async_dc, asynchronous[name]))
    held = {scenario.scenario.name: [held_in(case, scenario) for case in CASES] for scenario in scenarios}
    print()
    print("\n".join(held_lines(held)))
    chosen = [row for row in rows if row.is_chosen]
    limits = {s.scenario.name: limits_of(s, row.plan) for s, row in zip(scenarios, chosen, strict=True)}
    print("\nlimits, the set kept, times the prices of the file:")
    print("\n".join(f"{name}: {json.dumps(finite(one))}" for name, one in limits.items()))
    met = all(row.is_met for row in chosen)
    print(f"targets {'met' if met else 'missed'}; {time.process_time() - began:.0f} CPU-s")
    if options.json:
        whole = {
            "met": met,
            "simulated_saving": {row.scenario: row.measured_saving for row in chosen},
            "rows": [as_object(row) for row in rows],
            "baselines": {s.scenario.name: [asdict(one) for one in references_of(s)] for s in scenarios},
            "async_dc_simulated_idle_share": asynchronous,
            "sensitivity": {name: [asdict(one) for one in cases] for name, cases in held.items()},
            "limits": limits,
        }
        print(json.dumps(finite(whole)))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
