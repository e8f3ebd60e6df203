"""Curves as inline SVG, and which figures are drawn together, under which title and unit.

The curves follow the page's light or dark variables, can be read without colour, and need no script. A curve of many
steps is drawn as the mean of each bucket, over a band from its smallest to its largest value. A figure that no chart
names gets a chart of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from html import escape
from typing import NamedTuple

from swarm.report.figures import Column, Figures, Point
from swarm.report.words import shown

TEXT_SHOWN = 1500  # Characters of a prompt or a completion; of an event's field a tenth


def text(value: object, most: int = TEXT_SHOWN) -> str:
    """Anybody's words, escaped. Marks that would reverse a line or hide in it are replaced."""
    words = str(value)
    cut = words[:most]
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in cut)
    more = f" [{len(words) - most} characters more]" if len(words) > most else ""
    return escape(plain) + more


WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40

DASHES = ("", "7 4", "2 3", "9 3 2 3", "1 2", "12 4")  # Besides the colours: not everybody sees or prints these
MAX_CURVES = len(DASHES)

CHART_STYLE = """
:root { --paper: #ffffff; --ink: #1d1f21; --dim: #5b6168; --line: #d5d8dc; --grid: #e8eaed; --card: #f6f7f9;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #aa4499; --c4: #8a6d00; --c5: #56707f; --limit: #b00020; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e6e8ea; --dim: #a2a8b0; --line: #3b4047;
  --grid: #292d33; --card: #1f2226; --c0: #56b4e9; --c1: #f0934e; --c2: #3fc79a; --c3: #d98cc6; --c4: #e0c341;
  --c5: #9fb6c3; --limit: #ff7b8a; } }
svg text { fill: var(--dim); font-size: 12px; }
.grid { stroke: var(--grid); fill: none; }
.axis { stroke: var(--line); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.band { stroke: none; opacity: 0.18; }
.limit { fill: none; stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 5 3; }
.mark { stroke: var(--limit); stroke-width: 1; opacity: 0.6; fill: none; }
""" + "\n".join(
    f".line.c{n} {{ stroke: var(--c{n}); }} .band.c{n}, .dot.c{n}, text .c{n} {{ fill: var(--c{n}); }}"
    for n in range(MAX_CURVES)
)
"""The colours of curves are Okabe and Ito's, which nearly everybody can tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    name: str
    column: Column
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What `draw` draws. `unit` is "" for plain numbers. `floor` and `ceiling` are always visible."""

    title: str
    unit: str
    curves: Sequence[Curve]
    floor: float | None = None
    ceiling: float | None = None
    steps: Sequence[tuple[float, float]] = ()  # A limit drawn as stairs: (first step, value)
    limit: str = ""  # The name of that limit
    across: str = "learner step"
    marks: Sequence[tuple[float, str]] = ()  # Steps at which something happened, and what
    until: float = 0.0  # The last step of the run, so that all charts have the same range


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of steps, from 0 on, and of values, and where they are in the picture."""

    x1: float
    y0: float
    y1: float

    def x(self, step: float) -> str:
        return _px(LEFT + (WIDTH - LEFT - RIGHT) * step / self.x1)

    def y(self, value: float) -> str:
        return _px(TOP + (HEIGHT - TOP - BOTTOM) * (self.y1 - value) / (self.y1 - self.y0))


def draw(chart: Chart) -> str:
    """A <figure> with its caption, picture and legend, for a page in CHART_STYLE."""
    unit = f" ({chart.unit})" if chart.unit else ""
    lasts = "; ".join(f"{curve.name} {shown(curve.column.last)}" for curve in chart.curves[:MAX_CURVES])
    parts = [
        f'<figure><figcaption>{text(chart.title)}<span class="unit">{text(unit)}</span></figcaption>',
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(chart.title + unit)} over '
        f'{text(chart.across)}; last: {text(lasts)}">',
    ]
    return "\n".join([*parts, *_drawn(chart), "</svg>", _legend(chart), "</figure>"])


def picture(title: str, said: str, charts: Sequence[Chart]) -> str:
    """An SVG file: a title, a line below it, and `charts` below one another with their legends."""
    head, foot = 60, 50
    height = head + len(charts) * (HEIGHT + foot)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<style>{CHART_STYLE}</style><rect width="{WIDTH}" height="{height}" fill="var(--paper)"/>',
        f'<text x="{TOP}" y="24" style="font-size: 16px">{text(title)}</text>',
        f'<text x="{TOP}" y="44">{text(said)}</text>',
    ]
    for number, chart in enumerate(charts):
        y = head + number * (HEIGHT + foot)
        keys = [
            f'<tspan class="c{place}" dx="14">&#9679;</tspan> {text(curve.name)}'
            for place, curve in enumerate(chart.curves[:MAX_CURVES])
        ]
        unit = f" ({chart.unit})" if chart.unit else ""
        parts += [
            f'<text x="{TOP}" y="{y + 14}">{text(chart.title + unit)}{"".join(keys)}</text>',
            f'<svg y="{y + 20}" width="{WIDTH}" height="{HEIGHT}">',
            *_drawn(chart),
            "</svg>",
        ]
    return "\n".join([*parts, "</svg>", ""])


def _drawn(chart: Chart) -> Iterator[str]:
    curves = [(curve, curve.column.points()) for curve in chart.curves[:MAX_CURVES]]
    scale = _scale(chart, [point for _, points in curves for point in points])
    yield from _axes(chart, scale)
    yield from _stairs(chart, scale)
    yield from _marks(chart, scale)
    for place, (curve, points) in enumerate(curves):
        yield from _curve(place, curve, points, scale)


def _scale(chart: Chart, points: Sequence[Point]) -> Scale:
    lows, highs = [point.low for point in points], [point.high for point in points]
    limits = [value for _, value in chart.steps]
    fixed = [value for value in (chart.floor, chart.ceiling) if value is not None]
    low, high = min([*lows, *limits, *fixed], default=0.0), max([*highs, *limits, *fixed], default=1.0)
    if high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
        room = abs(low) or 1.0
        low, high = low - (room / 2 if chart.floor is None else 0.0), high + room / 2
    last = max([chart.until, *(point.step for point in points)])
    step = _tick_step(high - low)
    bottom = math.floor(low / step) * step if chart.floor is None or low < chart.floor else chart.floor
    top = math.ceil(high / step - 1e-9) * step
    return Scale(last or 1.0, bottom, top)


def _tick_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that about five of them fit into `span`."""
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _ticks(low: float, high: float, *, whole: bool = False) -> Iterator[float]:
    step = _tick_step(high - low)
    step = max(1.0, step) if whole else step
    at = math.ceil(low / step - 1e-9)
    while at * step <= high + 1e-9 * step:
        yield at * step
        at += 1


def _axes(chart: Chart, scale: Scale) -> Iterator[str]:
    middle, bottom = (TOP + HEIGHT - BOTTOM) / 2, HEIGHT - BOTTOM
    for value in _ticks(scale.y0, scale.y1):
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{shown(value)}</text>'
    for step in _ticks(0.0, scale.x1, whole=True):
        yield f'<text x="{scale.x(step)}" y="{bottom + 16}" text-anchor="middle">{step:,.0f}</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>'
    across = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{across:g}" y="{HEIGHT - 6}" text-anchor="middle">{text(chart.across)}</text>'
    if chart.unit:
        turn = f'transform="rotate(-90 12 {middle:g})"'
        yield f'<text x="12" y="{middle:g}" {turn} text-anchor="middle">{text(chart.unit)}</text>'


def _stairs(chart: Chart, scale: Scale) -> Iterator[str]:
    if not chart.steps:
        return
    path = ""
    for number, (step, value) in enumerate(chart.steps):
        x = scale.x(min(scale.x1, max(0.0, step)))
        path += f"{'H' if number else 'M'}{x}{'V' if number else ' '}{scale.y(value)}"
    yield f'<path class="limit" d="{path}H{WIDTH - RIGHT}"><title>{text(chart.limit)}</title></path>'


def _marks(chart: Chart, scale: Scale) -> Iterator[str]:
    for step, words in chart.marks:
        if step <= scale.x1:
            where = f"M{scale.x(step)} {TOP}V{HEIGHT - BOTTOM}"
            yield f'<path class="mark" d="{where}"><title>{text(words)} at {text(chart.across)} {step:g}</title></path>'


def _curve(place: int, curve: Curve, points: Sequence[Point], scale: Scale) -> Iterator[str]:
    if any(point.low != point.high for point in points):
        there = [f"{scale.x(p.step)} {scale.y(p.high)}" for p in points]
        back = [f"{scale.x(p.step)} {scale.y(p.low)}" for p in reversed(points)]
        yield f'<path class="band c{place}" d="M{"L".join(there + back)}Z"/>'
    path = "L".join(f"{scale.x(p.step)} {scale.y(p.mean)}" for p in points)
    dash = f' stroke-dasharray="{DASHES[place]}"' if DASHES[place] else ""
    # A single point has no length to draw.
    if len(points) > 1:
        yield f'<path class="line c{place}"{dash} d="M{path}"><title>{text(curve.name)}</title></path>'
    if curve.dots or len(points) == 1:
        for p in points:
            yield (
                f'<circle class="dot c{place}" cx="{scale.x(p.step)}" cy="{scale.y(p.mean)}" r="3">'
                f"<title>{text(curve.name)} at {p.step:g}: {shown(p.mean)}</title></circle>"
            )


def _legend(chart: Chart) -> str:
    rows = [
        f'<span><svg class="key" viewBox="0 0 30 8" aria-hidden="true"><path class="line c{place}" '
        f'stroke-dasharray="{DASHES[place] or "none"}" d="M0 4H30"/></svg>{text(curve.name)} '
        f"<b>{shown(curve.column.last)}</b></span>"
        for place, curve in enumerate(chart.curves[:MAX_CURVES])
    ]
    if chart.steps:
        rows.append(
            '<span><svg class="key" viewBox="0 0 30 8" aria-hidden="true"><path class="limit" d="M0 4H30"/></svg>'
            f"{text(chart.limit)} <b>{shown(chart.steps[-1][1])}</b></span>"
        )
    if chart.marks:
        rows.append(
            '<span><svg class="key" viewBox="0 0 30 8" aria-hidden="true"><path class="mark" d="M15 0V8"/></svg>'
            f"{text(', '.join(sorted({words for _, words in chart.marks})))}</span>"
        )
    if len(chart.curves) > MAX_CURVES:
        rows.append(f"<span>and {len(chart.curves) - MAX_CURVES} more in the table of figures</span>")
    return f'<p class="legend">{"".join(rows)}</p>'


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# -- which charts --------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """A chart of the figures whose names match the patterns in `names`. Without any it is left out. A share is drawn
    from 0 to 1."""

    title: str
    names: str
    unit: str = ""
    floor: float | None = 0


LEARNING = (
    Wanted("Reward of a rollout", "reward reward_std reward_shaped", floor=None),
    Wanted("Each reward", "rewards/*/mean", floor=None),
    Wanted("Each reward: standard deviation", "rewards/*/std"),
    Wanted("Exact answers while training", "exact_match", "share"),
    Wanted("Groups without variance", "frac_reward_zero_std", "share"),
    Wanted("Rewards that failed", "reward_failed_share", "share"),
    Wanted("Loss", "loss", floor=None),
    Wanted("Entropy", "entropy", "nats a token"),
    Wanted("Gradient norm before clipping", "grad_norm"),
    Wanted("mismatch_kl: engine against learner, same version", "mismatch_kl", "nats"),
    Wanted("KL to the reference", "kl", "nats"),
    Wanted("Tokens that are clipped", "clip_ratio/*", "share of tokens"),
    Wanted("Importance ratio", "sampling/importance_sampling_ratio/*", floor=None),
    Wanted("Log-prob difference", "sampling/sampling_logp_difference/*", "nats"),
    Wanted("Length of completions", "completions/*_length", "tokens"),
    Wanted("Completions cut at the limit", "completions/clipped_ratio", "share"),
    Wanted("Turns of an episode", "episode/turns/mean"),
    Wanted("Tokens of a turn", "episode/turn_tokens/mean", "tokens"),
    Wanted("Reward of each turn", "episode/reward/turn_*", floor=None),
    Wanted("Episodes at a limit, and their drawn tokens", "episode/*_share", "share"),
    Wanted("Learning rate", "learning_rate"),
    Wanted("Optimiser steps of a learner step", "optimizer_steps optimizer_steps_skipped"),
)

SWARM = (
    Wanted("Staleness of the rollouts trained on", "staleness/mean staleness/max staleness/aim", "learner steps"),
    Wanted("Time", "train_step_s broadcast_s", "s"),
    Wanted("Learner idle", "idle_share predicted_idle_share", "share"),
    Wanted("Rollouts", "rollouts_per_s", "1/s"),
    Wanted("Samplers", "samplers active standby"),
    Wanted("Rollouts accepted", "rollouts_accepted"),
    Wanted("Tokens accepted", "tokens_accepted"),
)

COSTS = (
    Wanted("Cost in all", "cost_total"),
    Wanted("Cost of a learner step", "cost_per_step"),
    Wanted("Cost of a rollout", "cost_per_rollout"),
    Wanted("Cost of a token", "cost_per_token"),
)

MAX_OTHERS = 32  # Charts of figures that none of these name


def sections(found: Figures) -> list[tuple[str, list[Chart]]]:
    """Titles and their charts; a section without figures has none."""
    free = dict.fromkeys(name for name, column in found.columns.items() if column.values)
    learning = [*_held_out(found), *(replace(one, marks=found.marks()) for one in _charts(LEARNING, found, free))]
    swarm = [
        replace(one, steps=found.bounds, limit="max_staleness, the bound S") if one.title == SWARM[0].title else one
        for one in _charts(SWARM, found, free)
    ]
    costs = list(_charts(COSTS, found, free)) if found.last("cost_total") else []
    others = [_chart(found, Wanted(name, name, floor=None), [name]) for name in free if not name.startswith("cost_")]
    return [("Learning", learning), ("Swarm", swarm), ("Cost", costs), ("Other figures", others[:MAX_OTHERS])]


def _held_out(found: Figures) -> Iterator[Chart]:
    """Shares in one chart; `pass_at_1` is `exact_match` by another name. Each other figure in a chart of its own."""
    names = [name for name in found.evaluated if name != "pass_at_1" or "exact_match" not in found.evaluated]
    shares = sorted(name for name in names if name == "exact_match" or name.startswith("pass"))
    for chosen in ([shares] if shares else []) + [[name] for name in names if name not in shares]:
        is_share = chosen is shares
        yield Chart(
            title="Held-out prompts" if is_share else f"Held-out {chosen[0]}",
            unit="share" if is_share else "",
            curves=[Curve(name=name, column=found.evaluated[name], dots=True) for name in chosen],
            floor=0 if is_share else None,
            ceiling=1 if is_share else None,
            across="policy version",
            until=found.steps,
        )


def _charts(wanted: tuple[Wanted, ...], found: Figures, free: dict[str, None]) -> Iterator[Chart]:
    """Takes the figures of each chart out of `free`; what is too much for one chart goes on in another."""
    for one in wanted:
        names = list(dict.fromkeys(n for pattern in one.names.split() for n in free if fnmatchcase(n, pattern)))
        for name in names:
            del free[name]
        for at in range(0, len(names), MAX_CURVES):
            yield _chart(found, one, names[at : at + MAX_CURVES])


def _chart(found: Figures, wanted: Wanted, names: Sequence[str]) -> Chart:
    return Chart(
        title=wanted.title,
        unit=wanted.unit,
        curves=[Curve(name=name, column=found.columns[name]) for name in names],
        floor=wanted.floor,
        ceiling=1 if wanted.unit == "share" else None,
        until=found.steps,
    )
