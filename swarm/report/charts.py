"""Curves as inline SVG: light and dark by the page's own variables, readable without colour, no script.

A curve of many steps is drawn as the mean of each bucket, over a band from the least to the largest value in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.report.figures import Column, Point
from swarm.report.words import shown, text

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
TICKS = 5

DASHES = ("", "7 4", "2 3", "9 3 2 3", "1 2", "12 4")
"""Of the curves of one chart, besides their colours: some see no difference in these, some print in grey."""

MOST_CURVES = len(DASHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart. `dots` marks each point, for values that are few."""

    name: str
    column: Column
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`unit` is of the values, "" of plain numbers. `floor` and `ceiling` are always in sight."""

    title: str
    unit: str
    curves: Sequence[Curve]
    floor: float | None = None
    ceiling: float | None = None
    steps: Sequence[tuple[float, float]] = ()
    """A limit that is drawn as stairs: its value from which step on."""
    limit: str = ""
    """What the stairs are."""
    across: str = "learner step"
    until: float = 0.0
    """The last step of the run, so that all charts show the same of it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Where values lie in the picture."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, step: float) -> str:
        return _px(LEFT + (WIDTH - LEFT - RIGHT) * (step - self.x0) / (self.x1 - self.x0))

    def y(self, value: float) -> str:
        return _px(TOP + (HEIGHT - TOP - BOTTOM) * (self.y1 - value) / (self.y1 - self.y0))


def draw(chart: Chart) -> str:
    """A <figure> with its caption, picture and legend."""
    curves = [(curve, curve.column.points()) for curve in chart.curves[:MOST_CURVES]]
    scale = _scale(chart, [point for _, points in curves for point in points])
    unit = f" ({chart.unit})" if chart.unit else ""
    lasts = "; ".join(f"{curve.name} {shown(curve.column.last)}" for curve, _ in curves)
    parts = [
        f'<figure><figcaption>{text(chart.title)}<span class="unit">{text(unit)}</span></figcaption>',
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(chart.title + unit)} over '
        f'{text(chart.across)}; last: {text(lasts)}">',
        *_axes(chart, scale, unit),
        *_stairs(chart, scale),
    ]
    for place, (curve, points) in enumerate(curves):
        parts += _curve(place, curve, points, scale)
    return "\n".join([*parts, "</svg>", _legend(chart), "</figure>"])


def _scale(chart: Chart, points: Sequence[Point]) -> Scale:
    lows, highs = [point.low for point in points], [point.high for point in points]
    limits = [value for _, value in chart.steps]
    fixed = [value for value in (chart.floor, chart.ceiling) if value is not None]
    low, high = min([*lows, *limits, *fixed], default=0.0), max([*highs, *limits, *fixed], default=1.0)
    if high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    last = max([chart.until, *(point.step for point in points)])
    step = _tick_step(high - low)
    bottom = math.floor(low / step) * step if chart.floor is None or low < chart.floor else chart.floor
    top = math.ceil(high / step - 1e-9) * step
    return Scale(0.0, last or 1.0, bottom, top)


def _tick_step(span: float) -> float:
    """1, 2 or 5 times a power of ten: about TICKS of them are in `span`."""
    raw = span / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _ticks(low: float, high: float, *, whole: bool = False) -> Iterator[float]:
    step = _tick_step(high - low)
    step = max(1.0, step) if whole else step
    at = math.ceil(low / step - 1e-9)
    while at * step <= high + 1e-9 * step:
        yield at * step
        at += 1


def _axes(chart: Chart, scale: Scale, unit: str) -> Iterator[str]:
    middle, bottom = (TOP + HEIGHT - BOTTOM) / 2, HEIGHT - BOTTOM
    for value in _ticks(scale.y0, scale.y1):
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{shown(value)}</text>'
    for step in _ticks(scale.x0, scale.x1, whole=True):
        yield f'<text x="{scale.x(step)}" y="{bottom + 16}" text-anchor="middle">{step:,.0f}</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>'
    across = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{across:g}" y="{HEIGHT - 6}" text-anchor="middle">{text(chart.across)}</text>'
    if unit:
        turn = f'transform="rotate(-90 12 {middle:g})"'
        yield f'<text x="12" y="{middle:g}" {turn} text-anchor="middle">{text(chart.unit)}</text>'


def _stairs(chart: Chart, scale: Scale) -> Iterator[str]:
    if not chart.steps:
        return
    path = ""
    for number, (step, value) in enumerate(chart.steps):
        x = scale.x(min(scale.x1, max(scale.x0, step)))
        path += f"{'H' if number else 'M'}{x}{'V' if number else ' '}{scale.y(value)}"
    yield f'<path class="limit" d="{path}H{WIDTH - RIGHT}"><title>{text(chart.limit)}</title></path>'


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
        for place, curve in enumerate(chart.curves[:MOST_CURVES])
    ]
    if chart.steps:
        rows.append(
            '<span><svg class="key" viewBox="0 0 30 8" aria-hidden="true"><path class="limit" d="M0 4H30"/></svg>'
            f"{text(chart.limit)} <b>{shown(chart.steps[-1][1])}</b></span>"
        )
    if len(chart.curves) > MOST_CURVES:
        rows.append(f"<span>and {len(chart.curves) - MOST_CURVES} more in the table of figures</span>")
    return f'<p class="legend">{"".join(rows)}</p>'


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
