"""`echo-node simulate`: a scenario on the virtual clock, its and its figures."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from swarm.cli.options import Json
from swarm.cli.plan import ScenarioFile, load_scenario, planned, progress
from swarm.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swarm.plan.plan import Plan
    from swarm.plan.scenario import Scenario
    from swarm.plan.simulate.outcome import Settings, SwarmFigures

Activate = Literal["all", "cheapest"]

MAX_HOURS = 24.0 * 31  # A month: at a thousand nodes half an hour of computing
GB = 1e9


def simulate(
    file: ScenarioFile,
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 0,
    hours: Annotated[float | None, typer.Option(help="Virtual hours. Default: those of the file.")] = None,
    activate: Annotated[str, typer.Option(help="all, or cheapest: who is needed.")] = "cheapest",
    max_staleness: Annotated[int | None, typer.Option(min=0, help="S. Default: that of the plan.")] = None,
    publish_every_steps: Annotated[int | None, typer.Option(min=1, help="K. Default: that of the plan.")] = None,
    budget_per_hour: Annotated[float | None, typer.Option(help="Most that samplers may cost, with traffic.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="A line for each event of interest.")] = False,
    as_json: Json = False,
) -> None:
    """Run a scenario on a virtual clock. Its idle time, staleness and costs, before anything is paid."""
    from swarm.pay.selection import Rules
    from swarm.plan.simulate.swarm import CapacitySimulation

    scenario = load_scenario(file)
    if activate not in get_args(Activate):
        raise UserError(f"--activate {activate}: all or cheapest")
    if budget_per_hour is not None and not budget_per_hour >= 0:
        raise UserError(f"--budget-per-hour {budget_per_hour}: it must be at least 0")
    with progress(shown=sys.stderr.isatty() and not trace) as show_progress:
        show_progress("choosing S and K as plan does", 0.0)
        settings = settings_of(
            scenario, hours=hours, max_staleness=max_staleness, publish_every_steps=publish_every_steps
        )
        rules = Rules(
            activate="all" if activate == "all" else "cheapest",
            budget_per_hour=budget_per_hour,
            least_margin=scenario.staleness.safety_margin - 1,
        )
        simulation = CapacitySimulation(
            scenario,
            settings,
            seed=seed,
            rules=rules,
            tell=typer.echo if trace else None,
            progress=lambda share: show_progress(f"simulating {settings.hours:g} hours", share),
        )
        figures = simulation.run()
    title = f"{scenario.scenario.name}: {settings.hours:g} h, seed {seed}, {activate}"
    if as_json:
        typer.echo(json.dumps(as_object(scenario, settings, figures, seed=seed, activate=activate)))
    else:
        show(scenario, settings, figures, title)


def settings_of(
    scenario: Scenario, *, hours: float | None, max_staleness: int | None, publish_every_steps: int | None
) -> Settings:
    """Return what to simulate. Raise UserError if that makes no sense."""
    from swarm.plan.simulate.outcome import Settings

    if hours is None:
        hours = scenario.simulation.hours
    if not 0 < hours <= MAX_HOURS:
        raise UserError(f"--hours {hours:g}: from more than 0 to {MAX_HOURS:g}")
    bound, period = max_staleness, publish_every_steps
    if bound is None or period is None:
        found = planned_setting(scenario, max_staleness=bound)
        bound, period = found.max_staleness, period or found.publish_every_steps
    if period > bound + 1:
        raise UserError(
            f"--publish-every-steps {period}: more than S + 1 = {bound + 1}, so samplers would wait for ever"
        )
    return Settings(hours=hours, max_staleness=bound, publish_every_steps=period)


def planned_setting(scenario: Scenario, *, max_staleness: int | None) -> Plan:
    """Return the plan of which the bound and the period are taken; `max_staleness`, if given, is the bound."""
    from swarm.pay.model import NEARLY_BUSY

    if max_staleness is not None:
        bounds = scenario.staleness.model_copy(update={"S": (max_staleness,)})
        scenario = scenario.model_copy(update={"staleness": bounds})
    return planned(scenario, idle_target=NEARLY_BUSY)


# -- words ---------------------------------------------------------------------------------------------------------


def as_object(
    scenario: Scenario, settings: Settings, figures: SwarmFigures, *, seed: int, activate: str
) -> dict[str, Any]:
    """Return the object for --json. An infinite value (a step that never came) is null."""
    found = {
        "scenario": scenario.scenario.name,
        "currency": scenario.scenario.currency,
        "seed": seed,
        "activate": activate,
        "max_staleness": settings.max_staleness,
        "publish_every_steps": settings.publish_every_steps,
        **asdict(figures),
    }
    found |= found.pop("capacity")
    return {name: None if value == math.inf else value for name, value in found.items()}


def show(scenario: Scenario, settings: Settings, figures: SwarmFigures, title: str) -> None:
    from swarm.report.terminal import console

    out = console()
    out.print(f"[bold]{title}[/bold]")
    out.print(figures_table(scenario, settings, figures))
    out.print(classes_table(scenario, figures))


def figures_table(scenario: Scenario, settings: Settings, figures: SwarmFigures) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows_of(scenario, settings, figures):
        table.add_row(name, value)
    return table


def rows_of(scenario: Scenario, settings: Settings, figures: SwarmFigures) -> list[tuple[str, str]]:
    """Return names and values as a person reads them."""
    measured, happened, currency = figures.capacity, figures.happened, scenario.scenario.currency
    return [
        ("learner idle", f"{measured.idle_share:.1%}"),
        ("step", f"{measured.step_s:,.0f} s, of which {scenario.learner.train_step_s:,.0f} s are training"),
        ("rollouts", f"{measured.rollouts:,}, {measured.discarded_share:.1%} discarded"),
        (
            "staleness",
            f"{measured.mean_staleness:.2f} in the mean, at most S = {settings.max_staleness};"
            f" published every {settings.publish_every_steps} step(s)",
        ),
        ("cost", f"{figures.cost_per_step:,.2f} {currency} per step, {figures.cost_per_hour:,.2f} per hour"),
        ("", f"{figures.cost_per_million_tokens:,.3f} {currency} per million tokens"),
        (
            "samplers",
            f"{figures.active:,.0f} active of {figures.there:,.0f} there or on offer,"
            f" {measured.samplers_idle_share:.1%} of the active ones' places idle",
        ),
        ("version at all active", f"{figures.broadcast_s:,.0f} s after its publication"),
        (
            "traffic",
            f"broadcasts {figures.broadcast_bytes_per_hour / GB:,.0f} GB/h, joins"
            f" {figures.join_bytes_per_hour / GB:,.0f} GB/h; the learner sends"
            f" {figures.learner_up_bytes_per_hour / GB:,.0f} GB/h",
        ),
        (
            "fleet",
            f"{happened.joins} joins, {happened.left} left, {happened.vanished} vanished; {happened.activated}"
            f" activated, {happened.stood_by} put on standby",
        ),
        ("lost", f"{happened.rollouts_lost} rollouts with their samplers, {happened.rollouts_failed} failed"),
    ]


def classes_table(scenario: Scenario, figures: SwarmFigures) -> RenderableType:
    """Show what each class cost and did; leave out idle classes."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("class")
    table.add_column(f"{scenario.scenario.currency} per hour", justify="right")
    table.add_column("rollouts per hour", justify="right")
    for name, cost in sorted(figures.cost_per_hour_by_class.items(), key=lambda entry: -entry[1]):
        rollouts = figures.rollouts_by_class.get(name, 0) / figures.hours
        if cost or rollouts:
            table.add_row(name, f"{cost:,.2f}", f"{rollouts:,.0f}" if rollouts else "")
    return table
