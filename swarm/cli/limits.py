"""The command `limits`: what a node of one's own may use of this machine, changed while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Changes = Annotated[
    list[str] | None, typer.Argument(help="NAME=VALUE ...: `none` lifts one, `default` is what `join` was given.")
]
StateDir = Annotated[Path | None, typer.Option(help="Of which node. Default: of the only one.")]


def limits(changes: Changes = None, *, state_dir: StateDir = None) -> None:
    """Show or change what a node on this machine may use. It takes a second, and outlives a restart of the node."""
    from swarm.node.identity import own_directory
    from swarm.node.limits import FILE, change_limits, described

    directory = own_directory(state_dir)
    typer.echo("\n".join(described(change_limits(directory / FILE, changes or []))))
