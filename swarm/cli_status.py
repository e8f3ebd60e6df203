"""The command `status`: what a running node says of itself, once or for as long as somebody looks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WATCH_S = 2.0
"""Between two looks of --watch: few figures change faster."""

RESIZE_S = 0.25
"""A screen that is watched is drawn again so soon after its terminal was resized."""


def status(
    url: Annotated[str, typer.Argument(help="host:port or URL of a running node.")],
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All that it says, as one JSON object in a line.")] = False,
) -> None:
    """What a running node says of itself: a learner, a sampler or a relay."""
    from rich.console import Console

    console, found = Console(), asyncio.run(_fetch(url))
    if watch:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # The way to end this one: no fault, and nothing to say.
            signal.signal(number, signal.default_int_handler)
        try:
            _watch(console, url, found, as_json=as_json)
        except KeyboardInterrupt:
            return
    elif as_json:
        typer.echo(json.dumps(found))
    else:
        console.print(_screen(console, found))


def _watch(console: Console, url: str, found: dict[str, Any], *, as_json: bool) -> None:
    """For ever: a screen that is drawn again in place, or a line each time where that cannot be."""
    from rich.live import Live

    from swarm.dashboard.terminal import plain_line

    if as_json or not console.is_terminal:
        for one in _looks(url, found):
            words = one if isinstance(one, str) else json.dumps(one) if as_json else plain_line(one)
            print(words, flush=True)
            time.sleep(WATCH_S)
    # A screen of its own, which no terminal wraps anew when it is resized.
    last: RenderableType = ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for one in _looks(url, found):
                drawn, until = (0, 0), time.monotonic() + WATCH_S
                while time.monotonic() < until:
                    if console.size != drawn:
                        drawn = console.size
                        last = _screen(console, one) if isinstance(one, dict) else one
                        live.update(last, refresh=True)
                    time.sleep(RESIZE_S)
    finally:
        console.print(last)


def _looks(url: str, found: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """The status that is known, then that of each moment; a line where there is no answer."""
    yield found
    while True:
        try:
            yield asyncio.run(_fetch(url))
        except UserError as fault:
            yield f"{fault}; asking again"


def _screen(console: Console, found: dict[str, Any]) -> RenderableType:
    from swarm.dashboard.terminal import status_screen

    is_cut = console.is_terminal or "LINES" in os.environ
    return status_screen(found, console.width, console.height if is_cut else None)


async def _fetch(text: str) -> dict[str, Any]:
    from random import SystemRandom

    from swarm.errors import PeerUnreachable, ProtocolError
    from swarm.http import PeerClient
    from swarm.node.bootstrap import address_of, read_bootstrap

    try:
        # Encrypted or not is found out; nothing secret is asked, so whoever answers is believed.
        async with PeerClient(await address_of(read_bootstrap(text), SystemRandom())) as peer:
            found: dict[str, Any] = json.loads(await peer.get("/v1/status", cap_bytes=4 << 20, timeout_s=10.0))
    except PeerUnreachable as error:
        raise UserError(f"no node answers: {error}") from error
    except (ProtocolError, ValueError) as error:
        raise UserError(f"{text} answers, but it is no echo-node") from error
    return found
