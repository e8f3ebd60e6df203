"""Views of a node's status in a terminal. Pure: a status in, something that rich prints out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARKS = " ▁▂▃▄▅▆▇█"


def live_view(status: dict[str, Any], rewards: Sequence[float], width: int) -> RenderableType:
    """The demo's view of a learner."""
    figures = Table.grid(padding=(0, 3))
    for _ in range(4):
        figures.add_column()
    pairs = live_figures(status)
    for left, right in zip(pairs[0::2], pairs[1::2], strict=True):
        figures.add_row(Text(left[0], style="dim"), left[1], Text(right[0], style="dim"), right[1])
    bar = ProgressBar(total=status["steps"], completed=status["step"], width=max(20, width - 6))
    curve = Text("shaped reward  ", style="dim") + Text(sparkline(rewards, max(10, width - 24)), style="green")
    title = f"echo-node demo · {status['state']}"
    return Panel(Group(figures, Text(), curve, Text(), bar), title=title, width=width)


def live_figures(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the live view, an even number of them."""
    metrics, capacity = status["metrics"], status["capacity"]
    figures = [
        ("step", f"{status['step']} / {status['steps']}"),
        ("version", status["version"] or "-"),
        ("shaped reward", _number(metrics.get("reward"))),
        ("exact match", _number(metrics.get("exact_match"))),
        ("held-out", _held_out(status)),
        ("rollouts/s", _number(status["rollouts_per_s"], 0)),
        ("staleness", _staleness(status)),
        ("samplers", _present(len(status["samplers"]), capacity["standby"])),
        ("time to install", _seconds(status["broadcast_s"])),
        ("train step", _seconds(metrics.get("train_step_s"))),
        ("learner idle", _share(capacity["idle_share"])),
        ("predicted idle", _share(capacity.get("predicted_idle_share"))),
    ]
    if cost := status["cost"]["cost_total"]:
        figures += [("cost", f"{cost:.2f}"), ("cost of a step", _price(status["cost"]["cost_per_step"]))]
    return figures


def plain_line(status: dict[str, Any]) -> str:
    """The same in one line, for a pipe or a log."""
    return "  ".join([status["state"], *(f"{name} {value}" for name, value in live_figures(status))])


TABLES = ("samplers", "broadcasts", "publics", "leaves", "metrics", "held_out", "capacity", "cost")
"""Keys of a status that are shown as tables, or have a line of their own."""


def status_table(status: dict[str, Any]) -> RenderableType:
    """Any node's status: plain values first, then whom it sees."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, value in status.items():
        if name not in TABLES:
            table.add_row(_text(name), _text(_plain(value)))
    for name, value in status.get("metrics", {}).items():
        table.add_row(_text(name), _text(_plain(value)))
    if status.get("held_out"):
        table.add_row("held_out", _held_out(status))
    for name, value in {**status.get("capacity", {}), **status.get("cost", {})}.items():
        if not isinstance(value, dict):
            table.add_row(_text(name), _text(_plain(value)))
    parts: list[RenderableType] = [table]
    parts += [_costs(status["cost"]["by_class"])] if status.get("cost", {}).get("cost_total") else []
    parts += [_samplers(status["samplers"])] if status.get("samplers") else []
    if waiting := [one for one in status.get("samplers", []) if one["standby"]]:
        parts.append(_waiting(waiting))
    parts += [_broadcasts(status["broadcasts"])] if status.get("broadcasts") else []
    parts += [_publics(status["publics"])] if status.get("publics") else []
    parts += [_leaves(status["leaves"])] if status.get("leaves") else []
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values in 0..1 as block characters."""
    return "".join(SPARKS[round(min(1.0, max(0.0, v)) * (len(SPARKS) - 1))] for v in values[-width:])


def _samplers(samplers: list[dict[str, Any]]) -> Table:
    table = Table(title="samplers", title_justify="left")
    for name in ("node", "class", "state", "installed", "samples", "rollouts/s", "silent", "verdicts"):
        table.add_column(name)
    for sampler in samplers:
        table.add_row(
            _text(sampler["node"][:12]),
            _text(sampler["device_class"] or "-"),
            "standby" if sampler["standby"] else "active",
            _text(sampler["installed"] or "-"),
            str(sampler["samples"]),
            f"{sampler['rollouts_per_s']:.0f}",
            f"{sampler['silent_s']:.1f} s",
            _text(_plain(sampler["verdicts"])),
        )
    return table


def _waiting(samplers: list[dict[str, Any]]) -> Table:
    table = Table(title="on standby", title_justify="left")
    for name in ("node", "because"):
        table.add_column(name)
    for sampler in samplers:
        table.add_row(_text(sampler["node"][:12]), _text(sampler["standby"]))
    return table


def _costs(by_class: dict[str, dict[str, Any]]) -> Table:
    """What each class of devices has cost, and given."""
    table = Table(title="cost by device class", title_justify="left")
    for name in ("class", "rent", "traffic", "active", "rollouts", "of 1,000"):
        table.add_column(name)
    for name, tally in by_class.items():
        table.add_row(
            _text(name or "-"),
            f"{tally['rent']:.2f}",
            f"{tally['traffic']:.2f}",
            f"{tally['active_s'] / 3600:.2f} h",
            str(tally["rollouts"]),
            _price(1000 * tally["cost"] / tally["rollouts"] if tally["rollouts"] else None),
        )
    return table


def _publics(publics: list[dict[str, Any]]) -> Table:
    table = Table(title="publics", title_justify="left")
    for name in ("node", "role", "state", "address", "last beat", "holds", "lag", "leaves"):
        table.add_column(name)
    for public in publics:
        table.add_row(
            _text(public["node"][:12]),
            public["role"],
            public["state"],
            _text(public["address"]),
            f"{public['beat_s']:.1f} s",
            public["held"] or "-",
            "-" if public["lag"] is None else str(public["lag"]),
            str(public["leaves"]),
        )
    return table


def _broadcasts(broadcasts: dict[str, dict[str, Any]]) -> Table:
    """How the last versions spread; the times are until so many percent of the samplers had installed one."""
    table = Table(title="broadcasts", title_justify="left")
    for name in ("version", "raw", "sent", "codecs", "received by", "50 %", "90 %", "100 %", "repairs"):
        table.add_column(name)
    for version, found in broadcasts.items():
        times = found.get("installed_s", {})
        table.add_row(
            version,
            _megabytes(found["raw_bytes"]),
            f"{_megabytes(found['encoded_bytes'])} ({found['encoded_bytes'] / found['raw_bytes']:.2%})",
            ", ".join(f"{codec} {count}" for codec, count in found["codecs"].items()),
            str(found["complete"]),
            *(_seconds(times.get(share)) for share in ("50", "90", "100")),
            str(found["repairs"]),
        )
    return table


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def _leaves(leaves: list[dict[str, Any]]) -> Table:
    table = Table(title="leaves that have this node as a home", title_justify="left")
    for name in ("node", "role", "last poll", "holds", "lag"):
        table.add_column(name)
    for leaf in leaves:
        table.add_row(
            _text(leaf["node"][:12]),
            leaf["role"] or "-",
            f"{leaf['beat_s']:.1f} s",
            leaf["held"] or "-",
            "-" if leaf["lag"] is None else str(leaf["lag"]),
        )
    return table


def _text(words: str) -> Text:
    """Words of a remote node as they are: no markup, no control characters."""
    return Text("".join(c if c.isprintable() else "?" for c in words))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _present(samplers: int, standby: int) -> str:
    return f"{samplers}, {standby} on standby" if standby else str(samplers)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _price(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _held_out(status: dict[str, Any]) -> str:
    if not status["held_out"]:
        return "-"
    last = status["held_out"][-1]
    return f"{last['exact_match']:.3f} (version {last['version']})"


def _staleness(status: dict[str, Any]) -> str:
    mean = status["metrics"].get("staleness/mean")
    if mean is None:
        return "-"
    return f"{mean:.1f} mean, {status['max_staleness_seen']} max of {status['max_staleness']} allowed"
