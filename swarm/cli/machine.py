"""Commands about this machine: what is wrong with it, and a node that it starts by itself."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from swarm.cli.plan import Json
from swarm.types import printable


def doctor(
    bootstrap: Annotated[
        list[str] | None, typer.Option(help="As join takes it: call the swarm too. May be repeated.")
    ] = None,
    role: Annotated[Literal["sampler", "relay"], typer.Option(help="What this machine is to be.")] = "sampler",
    state_dir: Annotated[Path | None, typer.Option(help="The node's state directory, if not the default.")] = None,
    as_json: Json = False,
) -> None:
    """Look at this machine, say what is wrong and the exact fix. Exit status 1 if there is something to fix."""
    from swarm.node.doctor import examine

    checks = asyncio.run(examine(bootstrap or [], role, state_dir))
    found = [check for check in checks if check.fix]
    if as_json:
        typer.echo(json.dumps({"fine": not found, "findings": [*map(asdict, found)], "checks": [*map(asdict, checks)]}))
        raise typer.Exit(bool(found))
    for check in checks:
        typer.echo(printable(f"{'FIX ' if check.fix else 'fine'}  {check.about:7}  {check.what}"))
        if check.fix:
            typer.echo(printable(f"{'':13}  -> {check.fix}"))
    if bootstrap is None:
        typer.echo("the swarm was not called: name a member with --bootstrap")
    raise typer.Exit(bool(found))
