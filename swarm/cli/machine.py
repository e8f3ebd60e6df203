"""Commands about this machine: what is wrong with it, and a node that it starts by itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swarm.cli.options import Json
from swarm.errors import UserError
from swarm.types import printable

if TYPE_CHECKING:
    from swarm.settings import JoinConfig

UNIT = "echo-node.service"
RAW = {"allow_extra_args": True, "ignore_unknown_options": True}  # What follows is for `join`
STOP_S = 20.0  # Beyond --grace: to hand back samples and say farewell

TEMPLATE = """\
# Written by `echo-node service install`, which writes it again; `echo-node service remove` removes it.
[Unit]
Description=echo-node {role}
StartLimitIntervalSec=3600
StartLimitBurst=5

[Service]
ExecStart={command}
WorkingDirectory={place}
{environment}# 2: its owner has to change something. 130: it was told twice to stop.
Restart=on-failure
RestartSec=30
RestartPreventExitStatus=2
SuccessExitStatus=130
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={stop_s:.0f}
LimitNOFILE=4096
UMask=0077
NoNewPrivileges=yes
# A user's systemd can mount nothing without a user namespace of its own.
PrivateUsers=yes
ProtectSystem=strict
ReadWritePaths={state} -%C -%h/.triton
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""
"""No RestrictNamespaces, because an engine gives up its rights in namespaces of its own (confine.py), and no
PrivateDevices, because of the GPU. Its libraries write caches beside the state directory."""

service_app = typer.Typer(help="Have this machine join by itself, whenever it runs.")


def doctor(
    bootstrap: Annotated[
        list[str] | None, typer.Option(help="As join takes it: call the swarm too. May be repeated.")
    ] = None,
    role: Annotated[Literal["sampler", "relay"], typer.Option(help="What this machine is to be.")] = "sampler",
    state_dir: Annotated[Path | None, typer.Option(help="The node's state directory, if not the default.")] = None,
    as_json: Json = False,
) -> None:
    """Look at this machine, say what is wrong and the exact fix. Exit status 1 if there is something to fix."""
    from swarm.join.doctor import examine

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


@service_app.command(context_settings=RAW)
def install(context: typer.Context) -> None:
    """Write a systemd user unit that joins with the arguments after `--`, as `join` takes them."""
    settings, path = _joining(context.args), _unit_path()
    from swarm.node.identity import default_states

    state = (settings.state_dir or default_states()).absolute()
    home = os.environ.get("XDG_STATE_HOME")
    state.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # -P, so that the directory that it starts in holds no module for it.
    command = (sys.executable, "-P", "-m", "swarm", "join", *context.args)
    path.write_text(
        TEMPLATE.format(
            role=settings.role,
            command=" ".join(map(quoted, command)),
            place=str(Path.cwd()).replace("%", "%%"),
            # Paths are no command: systemd takes a dollar as it is there.
            state=quoted(str(state)).replace("$$", "$"),
            environment=f"Environment={quoted(f'XDG_STATE_HOME={home}')}\n" if home else "",
            stop_s=settings.grace + STOP_S,
        )
    )
    typer.echo(f"{path} is written. To start it now and whenever this machine runs:")
    _next("daemon-reload", f"enable --now {UNIT}")
    typer.echo("  loginctl enable-linger          # or it ends when you log out")
    typer.echo(f"What it says: journalctl --user --follow --unit {UNIT}. To be rid of it: echo-node service remove")


@service_app.command()
def remove() -> None:
    """Remove that unit."""
    path = _unit_path()
    if not path.exists():
        raise UserError(f"there is no {path}: nothing to remove")
    path.unlink()
    (path.parent / "default.target.wants" / UNIT).unlink(missing_ok=True)
    typer.echo(f"{path} is removed. What still runs ends with:")
    _next(f"stop {UNIT}", "daemon-reload")


def quoted(argument: str) -> str:
    """Return an argument as a line of a unit has to write it."""
    if not argument.isprintable():
        raise UserError(f"{argument!r} cannot be written in a unit: leave out what is not printable")
    kept = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{kept}"'


def _joining(arguments: Sequence[str]) -> JoinConfig:
    """Return what `join` would make of them. Raise what it would raise."""
    from swarm.cli.run import app, join_settings
    from swarm.node.bootstrap import read_bootstraps

    command = typer.main.get_command(app).get_command(None, "join")  # type: ignore[attr-defined]
    given = command.make_context("join", list(arguments)).params
    config, _ = given.pop("config"), given.pop("stop_with_stdin")
    settings = join_settings({name: value for name, value in given.items() if value not in (None, ())}, config)
    read_bootstraps(settings.bootstrap)
    return settings


def _unit_path() -> Path:
    if sys.platform != "linux":
        raise UserError("a service is a unit of systemd, which only Linux has: start `join` in a terminal that stays")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user" / UNIT


def _next(*commands: str) -> None:
    for command in commands:
        typer.echo(f"  systemctl --user {command}")
