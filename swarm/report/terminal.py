"""A node's status for people: the panel of the live view, the screen of `status`, or one line.

Pure functions from a status to what rich prints.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm.report.words import (
    ID_LENGTH,
    KEPT,
    bottleneck,
    counted,
    counts,
    in_bytes,
    learner_figures,
    nodes,
    part,
    told,
    version_in_words,
    waiting_for,
)
from swarm.types import printable

NAME_WIDTH, VALUE_WIDTH = 15, 18  # Columns of a figure's name and value: two pairs fit into the live view
MAX_WIDTH = 10_000  # Columns of a pipe, for a library that wants a number
Figures = list[tuple[str, str]]
Row = tuple[str, ...]


def console() -> Console:
    """Return a console for stdout. What goes into a pipe or a file has no width: nothing in it is cut or wrapped."""
    is_narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if is_narrow else Console(width=MAX_WIDTH)


# -- a learner at work ---------------------------------------------------------------------------------------


def live_view(status: dict[str, Any] | None, rewards: Sequence[float], width: int, title: str) -> RenderableType:
    """A panel about a node. Of a learner with the mean rewards of its steps as a curve."""
    is_learner = status is None or status["role"] == "learner"
    why = bottleneck(status) if is_learner else ""
    parts: list[RenderableType] = [Text(why)] if why else []
    if status is not None:
        parts.append(_grid(figures(status), width))
        if rewards:
            sparks = Text(sparkline(rewards, max(10, width - 24)), style="green")
            parts += [Text(), Text(f"{'reward':{NAME_WIDTH}}", style="dim") + sparks, Text()]
        bar_width = max(20, width - 6)
        if is_learner:
            parts.append(ProgressBar(total=status["steps"], completed=status["step"], width=bar_width))
        elif syncing := status.get("syncing"):
            parts.append(ProgressBar(total=1.0, completed=syncing["share"], width=bar_width))
    state = printable(status["state"]) if status is not None else "starting"
    return Panel(Group(*parts), title=Text(f"{title} · {state}"), width=width)


def plain_line(status: dict[str, Any] | None) -> str:
    """Any node in one line, for a pipe or a log. Of what would make it longer than LINE_LENGTH, whole figures are left
    out."""
    known = dict(figures(status)) if status is not None else {}
    line = status["state"] if status is not None else "starting"
    if status is None or status["role"] == "learner":
        why = bottleneck(status) if waiting_for(status) else ""
        line = why if why.startswith(line) else f"{line}; {why}" if why else line
    for name in IN_A_LINE:
        more = f"; {name} {known[name]}" if known.get(name) else ""
        line += more if len(line + more) <= LINE_LENGTH else ""
    return printable(line)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as block characters, on a scale from 0 to 1, or wider if they need it."""
    sparks, shown = " ▁▂▃▄▅▆▇█", values[-width:]
    low, high = min((0.0, *shown)), max((1.0, *shown))
    return "".join(sparks[round((value - low) / (high - low) * (len(sparks) - 1))] for value in shown)


LINE_LENGTH = 120
IN_A_LINE = (
    *("step", "reward", "held-out", "samplers", "of all nodes", "staleness", "learner idle", "cost", "discarded"),
    *("engine has", "this node draws", "accepted", "not accepted", "dropped", "syncing", "links", "passed on"),
)
"""What is told in one line: of a learner the first ones, of a sampler or a relay the others."""


# -- a screen about any node ---------------------------------------------------------------------------------


def status_screen(status: dict[str, Any], width: int, height: int | None) -> RenderableType:
    """A node's figures, then as many of the nodes that it knows as fit into `height` lines; None: all of them."""
    parts = [*_titles(status), _grid(figures(status), width), Text()]
    rows = [_row(node) for node in nodes(status)]
    if rows:
        # The last line of the screen is the prompt's, and one is the table's head.
        room = len(rows) if height is None else max(1, height - _height(Group(*parts), width) - 2)
        shown = rows if len(rows) <= room else rows[: max(0, room - 1)]
        parts.append(_nodes(shown))
        if left := len(rows) - len(shown):
            parts.append(Text(f"and {left} more (--json has all)", style="dim"))
    return Group(*parts)


def figures(status: dict[str, Any]) -> Figures:
    """Names and values of what a node has done, with units; those not known yet are left out."""
    if status["role"] == "learner":
        return [(name, value) for name, value in learner_figures(status).items() if value]
    found = _sampler_figures(status) if status["role"] == "sampler" else _weight_figures(status)
    return [(name, value) for name, value in found if value]


def _sampler_figures(status: dict[str, Any]) -> Figures:
    return [
        ("engine", status.get("engine") or ""),
        ("draws at once", counted(status["places"], "sample") if status.get("places") else ""),
        ("engine has", version_in_words(status.get("installed"))),
        ("proven by", status.get("proof") or ""),
        ("this node draws", told(status.get("rollouts_per_s") or None, "{:.4g} rollouts/s")),
        ("each sample", told(status.get("tokens_per_s") or None, "{:,.0f} tokens/s")),
        ("last install", told(status.get("install_s") or None, "{:.2f} s")),
        ("drawing paused", told(status.get("pause_s") or None, "{:.2f} s")),
        ("accepted", _contributed(status)),
        ("not accepted", counts(status["verdicts"], without=KEPT)),
        ("dropped", counts(part(status, "dropped"))),
        *_weight_figures(status),
    ]


def _weight_figures(status: dict[str, Any]) -> Figures:
    """Of the weights that a relay or a sampler keeps and passes on."""
    return [
        ("weights here", version_in_words(status.get("map"))),
        ("newest version", version_in_words(status.get("newest"))),
        ("syncing", _syncing(status.get("syncing"))),
        ("last version", _stages(status.get("versions"))),
        ("links", str(status.get("streams") or "")),
        ("passed on", in_bytes(status["stream_bytes_sent"]) if status.get("stream_bytes_sent") else ""),
        ("uplink", f"{in_bytes(status['uplink_bytes_per_s'])}/s" if status.get("uplink_bytes_per_s") else ""),
        ("chunks refused", counts(part(status, "chunks_rejected"))),
    ]


def _contributed(status: dict[str, Any]) -> str:
    accepted = status["verdicts"].get("accepted", 0)
    tokens = status.get("accepted_tokens") or 0
    return f"{accepted:,} rollouts{f', {tokens:,} tokens' if tokens else ''}" if accepted else ""


def _syncing(syncing: dict[str, Any] | None) -> str:
    return f"{syncing['share']:.0%} of version {version_in_words(syncing['version'])}" if syncing else ""


def _stages(versions: dict[str, dict[str, float | None]] | None) -> str:
    """Return how long after its announcement the newest version that was applied reached each stage."""
    applied = [times for times in (versions or {}).values() if times.get("applied_s") and times.get("announced_s")]
    if not applied:
        return ""
    times = max(applied, key=lambda times: times["applied_s"] or 0.0)
    announced, told = times["announced_s"] or 0.0, []
    for name in ("first_chunk", "complete", "applied", "installed", "drawn"):
        if (at := times.get(f"{name}_s")) is not None:
            told.append(f"{name.replace('_', ' ')} {at - announced:.2f}")
    return f"{', '.join(told)} s"


def _titles(status: dict[str, Any]) -> list[RenderableType]:
    address = (status.get("addresses") or [status.get("url") or "dials out only"])[0]
    swarm = f"swarm {status['swarm'][:ID_LENGTH]}" if status.get("swarm") else "in no swarm yet"
    line = "encrypted" if status.get("encrypted") else "not encrypted"
    why = bottleneck(status) if status["role"] == "learner" else ""
    alarm, fault = status.get("alarm"), status.get("fault")
    notes = (
        f"{swarm} · {address} · {status.get('reachability', 'leaf')} · {line}",
        f"of long lists only a part is here; there are {counts(cut)}" if (cut := part(status, "cut")) else "",
        why,
        f"fault: {fault}" if fault and str(fault) not in why else "",
        f"alarm: {alarm['text'] if isinstance(alarm, dict) else alarm}" if alarm else "",
        f"stopped by {status['stopped_by']}" if status.get("stopped_by") else "",
        str(status.get("advice") or ""),
    )
    title = f"{status['role']} {status['node'][:ID_LENGTH]} · {status['state']}"
    return [_line(title, style="bold"), *(_line(note) for note in notes if note), Text()]


HEADS = ("node", "what", "state", "weights", "rollouts/s", "accepted", "silent", "")
"""Of the table of nodes. Rates and counts are each node's own."""


def _row(node: dict[str, Any]) -> Row:
    behind = f" ({node['lag']} behind)" if node.get("lag") and node["role"] != "sampler" else ""
    rate = told(node.get("rollouts_per_s") or None, "{:.4g}")
    return (
        node["name"],
        node.get("class") or node["role"] or "",
        node["state"],
        version_in_words(node["version"]) + behind if node["version"] else "",
        rate,
        told(node.get("accepted"), "{:,.0f}"),
        f"{node['last_seen_s']:.1f} s",
        node["why"],
    )


def _nodes(rows: list[Row]) -> Table:
    filled = [at for at in range(len(HEADS)) if any(row[at] for row in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for at in filled:
        head = HEADS[at]
        right = head in ("rollouts/s", "accepted", "silent")
        # A narrow screen cuts off the ends of kinds and reasons first, and figures last.
        least = 0 if head in ("what", "") else max(len(head), *(len(row[at]) for row in rows))
        table.add_column(head, no_wrap=True, overflow="ellipsis", justify="right" if right else "left", min_width=least)
    for row in rows:
        table.add_row(*(_text(row[at] or ("-" if HEADS[at] else "")) for at in filled))
    return table


# -- parts ---------------------------------------------------------------------------------------------------


def _grid(pairs: Figures, width: int) -> Table:
    """Two figures in a line, one on a narrow screen. One that is long goes on in the next line."""
    count = 2 if width >= 2 * (NAME_WIDTH + VALUE_WIDTH) else 1
    grid = Table.grid(padding=(0, 2, 0, 0))
    for at in range(2 * count):
        # The same width in every frame, so that nothing jumps.
        grid.add_column(overflow="fold", min_width=VALUE_WIDTH if at % 2 else NAME_WIDTH)
    for at in range(0, len(pairs), count):
        line = pairs[at : at + count]
        grid.add_row(*(cell for name, value in line for cell in (Text(name, style="dim"), _text(value))))
    return grid


def _height(view: RenderableType, width: int) -> int:
    return len(Console(width=width, file=io.StringIO()).render_lines(view))


def _line(words: str, style: str = "") -> Text:
    return Text(printable(words), style=style, overflow="fold")


def _text(words: str) -> Text:
    """A remote node's words, without markup and control characters."""
    return Text(printable(words))
