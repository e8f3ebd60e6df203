"""Commands about a swarm that does not exist yet: plan. They need a scenario file, but no model and no network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm.cli.options import Json
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.plan.plan import Plan, Progress
    from swarm.plan.scenario import Scenario

ScenarioFile = Annotated[Path, typer.Argument(metavar="FILE.toml", help="A scenario: docs/scenarios.md.")]
IdleTarget = Annotated[
    float, typer.Option(min=0.001, max=0.9, help="Share of the time that the learner may wait. Default: 0.02.")
]


def plan(file: ScenarioFile, idle_target: IdleTarget = 0.02, as_json: Json = False) -> None:
    """Choose the fleet for a scenario. What to rent or admit, what it costs, what binds."""
    from swarm.report.plans import plan_view
    from swarm.report.terminal import console

    scenario = load_scenario(file)
    with progress(shown=sys.stderr.isatty()) as tell:
        found = planned(scenario, idle_target=idle_target, progress=tell)
    console().print(plan_view(found))
    if as_json:
        typer.echo(json.dumps(plan_json(found)))


@contextmanager
def progress(*, shown: bool) -> Iterator[Progress]:
    """Show a bar on stderr during the block. The yielded function takes the current work and the share that is done."""
    if not shown:
        yield lambda what, share: None
        return
    from rich import progress as bars
    from rich.console import Console

    with bars.Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def planned(scenario: Scenario, *, idle_target: float, progress: Progress | None = None) -> Plan:
    """Plan, or raise UserError if no setting could work."""
    from swarm.plan.plan import NoFeasibleSet, plan_for

    try:
        return plan_for(scenario, idle_target=idle_target, progress=progress)
    except NoFeasibleSet as fault:
        raise UserError(str(fault)) from fault


def plan_json(found: Plan) -> dict[str, Any]:
    """Return the plan as plain values; savings are shares of each baseline's cost per step."""
    from dataclasses import asdict

    from swarm.plan.plan import saving

    return asdict(found) | {"saving": {one.name: saving(found.cost_per_step, one) for one in found.references}}


def load_scenario(file: Path) -> Scenario:
    from swarm.plan.scenario import Scenario
    from swarm.settings_file import load_file

    return load_file(Scenario, file)
