"""What a step costs in the scenarios of examples/, as planned and simulated, against two centralised baselines.

bin/python -m benchmarks.cost --json
bin/python -m benchmarks.cost --scenarios lab-4b

Without --scenarios, those with bf16 weights: lab-4b, volunteers-8b, internet-32b. The scenarios named -fp8 have the
rates of rounded weights, which no GPU has drawn with in echo-node, and internet-32b-fp8 those of fp8 caches, which it
does not offer.

Costs are compared at equal utilisation of the learner: the set is chosen for an idle share of at most 2 %. Baselines,
by the arithmetic of swarm/plan/plan.py: `colocated`, one machine that generates, switches and trains in turn;
`async_dc`, whole data-centre GPUs next to a learner that is taken never to wait.

The simulation (swarm/plan/simulate) has the real plane, planner, estimator, activation and cost book on a virtual
clock; links are drawn, churn and correlated departures are as in the file, and figures are of what follows the warm-up.

Exit status 1 if a simulated swarm saves less than 33.3 % against `colocated`, the least that ECHO-2 reports, or leaves
its learner idle for more than 3 %.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import Figures, ended, listed, parser_of, said
from swarm.cli.plan import planned
from swarm.pay.model import NEARLY_BUSY
from swarm.pay.selection import Rules
from swarm.plan.plan import saving
from swarm.plan.scenario import Scenario
from swarm.plan.simulate.outcome import Settings
from swarm.plan.simulate.swarm import CapacitySimulation
from swarm.settings_file import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("lab-4b", "volunteers-8b", "internet-32b", "volunteers-8b-fp8", "internet-32b-fp8")
TARGET_SAVING = 0.333
MAX_IDLE = NEARLY_BUSY + 0.01  # Of a simulation: the target of the choice, and a point for churn
HOURS = 14.0  # Virtual: the correlated departures of the files are at noon


def measure(scenario: Scenario) -> Figures:
    """A scenario: its plan, and what a simulated swarm gave with the plan's settings. `saving` has the share of each
    baseline's cost that is saved, planned and simulated."""
    plan = planned(scenario, idle_target=NEARLY_BUSY)
    settings = Settings(hours=HOURS, max_staleness=plan.max_staleness, publish_every_steps=plan.publish_every_steps)
    rules = Rules(least_margin=scenario.staleness.safety_margin - 1)
    found = CapacitySimulation(scenario, settings, seed=1, rules=rules).run()
    savings = {one.name: (saving(plan.cost_per_step, one), saving(found.cost_per_step, one)) for one in plan.references}
    return {
        "scenario": plan.scenario,
        "max_staleness": plan.max_staleness,
        "publish_every_steps": plan.publish_every_steps,
        "active": [len(plan.active), round(found.active, 1)],
        "idle_share": [plan.idle_share, found.capacity.idle_share],
        "mean_staleness": [plan.mean_staleness, found.capacity.mean_staleness],
        "cost_per_step": [plan.cost_per_step, found.cost_per_step],
        "saving": savings,
        "hours": found.hours,
        "met": savings["colocated"][1] >= TARGET_SAVING and found.capacity.idle_share <= MAX_IDLE,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", type=listed(str), default=NAMES[:3], help=f"of examples/: {', '.join(NAMES)}")
    options = parser.parse_args(arguments)
    began, rows = time.process_time(), list[Figures]()
    for name in options.scenarios:
        scenario = load_file(Scenario, EXAMPLES / f"{name}.toml")
        rows.append(said(measure(scenario)))
    met = all(row["met"] for row in rows)
    print(f"targets {'met' if met else 'missed'}; {time.process_time() - began:.0f} CPU-s")
    return ended(options, {"met": met, "rows": rows}, met=met)


if __name__ == "__main__":
    sys.exit(main())
