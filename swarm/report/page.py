"""The report of a run as one HTML page. It loads nothing from a network, runs no script, and forbids both.

Everything that comes from elsewhere (prompts, completions, reasons and names are strangers' words) is escaped where it
is inserted. A report is written to another name first, so that a reader sees the old or the new one, whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm.errors import UserError
from swarm.files import write_atomically
from swarm.report.charts import CHART_STYLE, TEXT_SHOWN, draw, sections, text
from swarm.report.figures import Figures, read_figures
from swarm.report.samples import Journaled, Sample, read_journal
from swarm.report.words import quoted, shown
from swarm.tasks.base import Read

STYLE = (
    CHART_STYLE
    + """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 8px; overflow-wrap: anywhere; }
header p, .unit, .legend { color: var(--dim); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; }
.tiles dt { color: var(--dim); font-size: 12px; }
.tiles dd { font-size: 19px; margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 16px; }
figure, article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: 0;
  padding: 12px; }
article { margin-bottom: 12px; }
figcaption { font-weight: 600; }
.unit { font-weight: 400; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 6px 0 0; font-size: 13px; }
.legend b { color: var(--ink); font-weight: 600; }
.key { display: inline-block; width: 30px; margin-right: 6px; vertical-align: middle; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin-bottom: 16px; }
caption { text-align: left; color: var(--dim); padding: 4px 0; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
td:not(:last-child) { white-space: nowrap; }
td:last-child { min-width: 12em; }
.texts dt { color: var(--dim); font-size: 12px; }
.texts dd { margin: 0 0 6px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
@media print { body { max-width: none; } figure, article { break-inside: avoid; } }
"""
)


MARK = "<!-- echo-node report -->"  # The second line of every report: a file with it may be overwritten
PIECES_SHOWN = 40  # Texts of an episode: twenty turns and what was said to them
SECRETS = ("token", "password", "secret")  # Settings with these in their names are not shown


def render(found: Figures, journaled: Journaled, *, now: float) -> str:
    """The page; `now` is the wall clock, in seconds."""
    config = found.config
    title = f"{config.get('task', 'a run')} on {config.get('model', 'a model')}"
    parts = [
        "<!doctype html>",
        MARK,
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">',
        f"<title>{text(title)} - echo-node</title><style>{STYLE}</style></head><body>",
        f"<header><h1>{text(title)}</h1><p>{_standing(found, now)}</p>{_tiles(found, journaled)}</header><main>",
    ]
    for name, charts in sections(found):
        if charts:
            parts.append(_section(name, '<div class="charts">', "\n".join(map(draw, charts)), "</div>"))
    if not found.steps:
        parts.append("<section><p>No learner step was taken yet.</p></section>")
    parts += [
        _figures(found),
        _samples(journaled),
        _section("Before and after", f"<pre>{text(found.ability)}</pre>") if found.ability else "",
        _events(found),
        _costs(found),
        _configuration(config),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _standing(found: Figures, now: float) -> str:
    steps = f"{found.steps} of {found.config.get('steps', '?')} learner steps"
    said = f"{text(found.state)}: {text(steps)}; report of {_clock(now)}"
    if found.began is not None and found.ended is not None:
        said += f"; the run from {_clock(found.began)} on, for {_duration(found.ended - found.began)}"
    if found.torn:
        said += f"; {found.torn} torn or damaged lines were passed over"
    return said + "."


def _tiles(found: Figures, journaled: Journaled) -> str:
    held_out = found.evaluated.get("exact_match")
    best = max(held_out.values) if held_out is not None and held_out.values else None
    mean, seen, withheld = map(found.columns.get, ("staleness/mean", "staleness/max", "rollouts_withheld"))
    tiles = [
        ("held-out, last", shown(held_out.last if held_out is not None else None) + " (unaudited)" * found.unaudited),
        ("held-out, best", shown(best)),
        ("reward, last", shown(found.last("reward"))),
        ("staleness, mean", shown(fmean(mean.values) if mean and mean.values else None)),
        ("staleness, most / bound", f"{shown(max(seen.values) if seen and seen.values else None)} / {found.bound}"),
        ("versions published", str(journaled.versions)),
        ("learner idle, last", shown(found.last("idle_share"))),
        ("rollouts accepted", shown(found.last("rollouts_accepted"))),
        ("rollouts withheld", shown(sum(withheld.values) if withheld else None)),
        ("cost", shown(found.last("cost_total"))),
    ]
    rows = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{rows}</dl>'


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table><caption>{text(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{text(title)}</h2>{''.join(parts)}</section>"


def _figures(found: Figures) -> str:
    columns = [*found.columns.items(), *((f"held-out {name}", column) for name, column in found.evaluated.items())]
    rows = [
        (name, shown(c.values[0]), shown(c.last), shown(min(c.values)), shown(max(c.values)), len(c.values))
        for name, c in columns
        if c.values
    ]
    heads = ("figure", "first", "last", "least", "most", "values")
    return _section("Figures", _table("All figures of metrics.jsonl", heads, rows)) if rows else ""


def _events(found: Figures) -> str:
    if not found.events:
        return ""
    counts = _table("How often each kind of event happened", ("event", "times"), sorted(found.kinds.items()))
    left_out = found.kinds.total() - len(found.events)
    rows = []
    for event in found.events:
        at = event.get("time")
        after = _duration(at - found.began) if isinstance(at, int | float) and found.began is not None else "-"
        rows.append((after, event.get("kind"), _fields(event)))
    caption = f"Events; {left_out} in the middle are left out" if left_out else "Events"
    return _section("Events", counts, _table(caption, ("after", "event", "what"), rows))


def _fields(event: Mapping[str, Any]) -> str:
    elsewhere = ("time", "kind")
    return ", ".join(
        f"{name} {quoted(str(value)[: TEXT_SHOWN // 10])}" for name, value in event.items() if name not in elsewhere
    )


def _costs(found: Figures) -> str:
    """Only the summary of a run that has ended says this."""
    by_class = (found.summary or {}).get("cost", {}).get("by_class")
    if not isinstance(by_class, dict) or not found.last("cost_total"):
        return ""
    names = ("rent", "traffic", "cost", "active_s", "rollouts")
    rows = [(kind or "-", *(shown(tally.get(name)) for name in names)) for kind, tally in by_class.items()]
    return _section("Cost by class", _table("Cost by device class, in the swarm's currency", ("class", *names), rows))


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with "not shown" in place of secrets."""
    return {
        name: "not shown" if any(part in name.lower().split("_") for part in SECRETS) else value
        for name, value in config.items()
    }


def _configuration(config: Mapping[str, Any]) -> str:
    rows = [(name, json.dumps(value)) for name, value in shown_config(config).items()]
    return _section("Configuration", _table("config.json", ("setting", "value"), rows))


def _samples(journaled: Journaled) -> str:
    if journaled.fault:
        body = f"<p>There are none: {text(journaled.fault)}.</p>"
    else:
        body = "".join(_article(one) for one in journaled.samples)
    return _section("Samples of rollouts", body)


def _article(one: Sample) -> str:
    said, named = one.said, (("prompt", one.prompt), ("wanted", one.wanted), ("completion", one.completion))
    shown = (*(pair for pair in named if pair[1]), *said[:PIECES_SHOWN])
    rows = "".join(f"<dt>{text(name)}</dt><dd><pre>{text(words)}</pre></dd>" for name, words in shown)
    if said[PIECES_SHOWN:]:
        rows += f"<dt>{len(said) - PIECES_SHOWN} more texts</dt>"
    return f'<article><h3>{text(one.head)}</h3><dl class="texts">{rows}</dl></article>'


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{minutes} min {seconds % 60:.0f} s" if minutes < 60 else f"{hours} h {minutes % 60} min"


def write_report(run_dir: Path, to: Path | None, readers: Callable[[], Read]) -> tuple[Path, str]:
    """Write the report of `run_dir` to `to`, by default to report.html in it. Returns where it is, and what it lacks
    because the run is damaged. UserError if it cannot be written."""
    path = to or run_dir / "report.html"
    if path.exists() and not _is_report(path):
        raise UserError(f"{path} exists and is not a report: remove it, or name another file with --to")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent} is not a directory: make it, or name another file with --to")
    journal = read_journal(run_dir, readers)
    page = render(read_figures(run_dir), journal, now=time.time())
    try:
        write_atomically(path, page.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path, journal.fault if journal.is_damaged else ""


def _is_report(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return MARK in file.read(200)
    except OSError:
        return False
