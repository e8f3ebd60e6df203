"""Attackers as real nodes against a real learner on this machine, and a table of what came of it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from swarm.cli.options import Json
from swarm.cli.run import DONE, NOT_REACHED, run_to_end, until_signalled
from swarm.errors import UserError
from tests.redteam.campaign import campaign, chosen

STEPS = 120  # Honest samplers have then learned the copy task, also beside other work
CROWD_STEPS = 40  # Enough for each attacker on the wire to be audited, and for one that begins late to be seen


def redteam(
    only: Annotated[str, typer.Option(help="Attacks by name, with commas between.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Learner steps of each run.")] = STEPS,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to repeat it with.")] = 1,
    honest: Annotated[int, typer.Option(min=0, help="Run honest samplers alone instead, with this many seeds.")] = 0,
    as_json: Json = False,
) -> None:
    """Attack a swarm on this machine: who is caught, after how many rollouts, and what it costs the run."""
    work = campaign(
        () if honest else chosen(only),
        steps=steps,
        crowd_steps=min(steps, CROWD_STEPS),
        seeds=honest or seeds,
        tell=lambda line: typer.echo(line, err=True),
    )
    report = run_to_end(until_signalled(work, stop_with_stdin=False))
    typer.echo(f"\n{report.table()}", err=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_object()))
    raise typer.Exit(DONE if report.as_expected else NOT_REACHED)


if __name__ == "__main__":
    try:
        typer.run(redteam)
    except UserError as fault:
        sys.exit(f"redteam: {fault}")
