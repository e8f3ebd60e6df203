"""Commands about one's own node, which runs on this machine: pause, resume, finish, leave, limits,
logs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from swarm.errors import UserError
from swarm.types import printable

LOOK_S = 0.5  # Between two looks at a log that is followed
StateDir = Annotated[
    Path | None, typer.Option(help="The node's state directory. Default: of your one node that runs here.")
]


def pause(state_dir: StateDir = None) -> None:
    """Stop drawing at once and free the memory. The node stays in the swarm, and draws again after `resume`."""
    typer.echo(ask_own("pause", state_dir))


def resume(state_dir: StateDir = None) -> None:
    """Draw again after `pause`."""
    typer.echo(ask_own("resume", state_dir))


def finish(state_dir: StateDir = None) -> None:
    """Finish the samples under way, hand them in, and leave."""
    typer.echo(ask_own("finish", state_dir))


def leave(state_dir: StateDir = None) -> None:
    """Hand back the samples under way, and leave at once."""
    typer.echo(ask_own("leave", state_dir))


def me(state_dir: StateDir = None) -> None:
    """Show what this machine has given, by swarm and in all. Only this machine keeps it."""
    from swarm.join.given import FILE, read_given, together
    from swarm.node.identity import default_states

    files = [state_dir / FILE] if state_dir is not None else sorted(default_states().glob(f"*/{FILE}"))
    if not (found := together(map(read_given, files))):
        raise UserError(f"no node has given anything from {state_dir or default_states()} yet: `join` begins")
    rows = list(found.values())
    if len(rows) > 1:
        rows.append(("in all", dict(sum((Counter(counts) for _, counts in rows), Counter()))))
    for what, counts in rows:
        typer.echo(f"{printable(what)}\n  {_in_words(counts)}")


def _in_words(counts: Mapping[str, float]) -> str:
    hours, drawn, passed = (counts.get(name, 0) for name in ("seconds", "rollouts", "passed_bytes"))
    words = [f"{hours / 3600:,.1f} hours"]
    words += [f"{drawn:,.0f} rollouts with {counts.get('tokens', 0):,.0f} tokens"] if drawn else []
    words += [f"{passed / 1e9:,.2f} GB of weights passed on"] if passed else []
    return ", ".join(words)


def limits(
    changes: Annotated[
        list[str] | None, typer.Argument(help="NAME=VALUE ...; `none` lifts one, `default` is what `join` was given.")
    ] = None,
    *,
    state_dir: StateDir = None,
) -> None:
    """Show or change what the node may use. It takes a second, outlives a restart, and needs no running node."""
    from swarm.join.logs import NAME
    from swarm.join.owner import FILE, change_limits, described

    directory = state_dir or _one_that_spoke(NAME)
    if not directory.is_dir():
        raise UserError(f"there is no state directory {directory}: `join --state-dir` makes it")
    typer.echo("\n".join(described(change_limits(directory / FILE, changes or []))))


def logs(
    state_dir: StateDir = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what is said from now on, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the last lines of what a node said and of its engine's log."""
    from swarm.join import logs as kept

    directory = state_dir or _one_that_spoke(kept.NAME)
    if not (directory / kept.NAME).exists():
        raise UserError(f"no node has said anything in {directory}: name its state directory with --state-dir")
    if follow:
        # This is the normal way to end it, so nothing is printed.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for line in kept.follow(directory):
            if line is not None:
                print(printable(line), flush=True)
            elif not follow:
                return
            else:
                time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return


def ask_own(what: str, state_dir: Path | None) -> str:
    """Return what one's own node answers, such as its address to "where"."""
    from swarm.node.control import ask_for

    return asyncio.run(ask_for(state_dir or _running_one(), {"do": what}, "node"))


def _running_one() -> Path:
    """Return the state directory of one's node that runs here. Raise UserError unless there is exactly one."""
    from swarm.node.control import running_nodes
    from swarm.node.identity import default_states

    found = running_nodes()
    if len(found) > 1:
        choice = " or ".join(f"--state-dir {path}" for path in found)
        raise UserError(f"{len(found)} nodes of yours run here: choose one with {choice}")
    if not found:
        raise UserError(f"no node of yours runs from {default_states()}: name its state directory with --state-dir")
    return found[0]


def _one_that_spoke(name: str) -> Path:
    """Return the state directory of one's node that runs here; if none does, of the one that said something last."""
    from swarm.node.control import running_nodes
    from swarm.node.identity import default_states

    said = sorted(default_states().glob(f"*/{name}"), key=lambda path: path.stat().st_mtime)
    return said[-1].parent if said and not running_nodes() else _running_one()
