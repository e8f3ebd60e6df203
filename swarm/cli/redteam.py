"""`echo-node redteam`: attackers as real nodes against a real learner on this machine, and a table of results."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from swarm.cli.plan import Json

STEPS = 120  # The honest run of the copy task has then learned, also beside other work
CROWD_STEPS = 40  # Enough for each attacker to be audited in full, and for one that begins late to be seen


def redteam(
    full: Annotated[bool, typer.Option("--full", help="Also what each attacker costs: 40 minutes.")] = False,
    only: Annotated[str, typer.Option(help="Attacks by name, with commas between.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Learner steps of a run whose accuracy is told.")] = STEPS,
    as_json: Json = False,
) -> None:
    """Attack a swarm on this machine. Who is caught, after how many rollouts, and what it costs the run."""
    from swarm.cli.run import DONE, NOT_REACHED, run_to_end, until_signalled
    from swarm.redteam.campaign import WORST, campaign, chosen

    names = chosen(only)
    measured = names if full else () if only else (WORST,)
    work = campaign(names, measured, steps=steps, crowd_steps=min(steps, CROWD_STEPS), tell=_tell)
    report = run_to_end(until_signalled(work, stop_with_stdin=False))
    typer.echo(f"\n{report.table()}", err=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_object()))
    raise typer.Exit(DONE if report.as_expected else NOT_REACHED)


def _tell(line: str) -> None:
    """Show a line of progress, in place of the last one on a terminal."""
    is_terminal = sys.stderr.isatty()
    typer.echo(f"\r\033[K{line}" if is_terminal else line, err=True, nl=not is_terminal)
