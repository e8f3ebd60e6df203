"""Curves as an SVG file. They follow the reader's light or dark colours and can be read without colour. A curve of many
steps is drawn as the mean of each bucket, over a band from its smallest to its largest value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from swarm.report.figures import Column, Point
from swarm.report.words import shown
from swarm.types import printable

TEXT_SHOWN = 400  # Characters of a title, a name or a mark


def text(value: object) -> str:
    """Anybody's words, escaped. Marks that would reverse a line or hide in it are replaced."""
    return escape(printable(str(value)[:TEXT_SHOWN]))


WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40

DASHES = ("", "7 4", "2 3", "9 3 2 3", "1 2", "12 4")  # Besides the colours: not everybody sees or prints these
MAX_CURVES = len(DASHES)

CHART_STYLE = """
:root { --paper: #ffffff; --ink: #1d1f21; --dim: #5b6168; --line: #d5d8dc; --grid: #e8eaed;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #aa4499; --c4: #8a6d00; --c5: #56707f; --limit: #b00020; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e6e8ea; --dim: #a2a8b0; --line: #3b4047;
  --grid: #292d33; --c0: #56b4e9; --c1: #f0934e; --c2: #3fc79a; --c3: #d98cc6; --c4: #e0c341;
  --c5: #9fb6c3; --limit: #ff7b8a; } }
svg text { fill: var(--dim); font-size: 12px; }
.grid { stroke: var(--grid); fill: none; }
.axis { stroke: var(--line); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.band { stroke: none; opacity: 0.18; }
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`unit` is "" for plain numbers. 0 and the `ceiling` are always visible."""

    title: str
    unit: str
    curves: Sequence[Curve]
    ceiling: float = 0.0
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
    yield from _marks(chart, scale)
    for place, (curve, points) in enumerate(curves):
        yield from _curve(place, curve, points, scale)


def _scale(chart: Chart, points: Sequence[Point]) -> Scale:
    low, high = min([0.0, *(point.low for point in points)]), max([chart.ceiling, *(point.high for point in points)])
    if high - low <= 1e-300:
        high = low + 0.5
    last = max([chart.until, *(point.step for point in points)])
    step = _tick_step(high - low)
    return Scale(last or 1.0, math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step)


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
    if len(points) == 1:
        for p in points:
            yield (
                f'<circle class="dot c{place}" cx="{scale.x(p.step)}" cy="{scale.y(p.mean)}" r="3">'
                f"<title>{text(curve.name)} at {p.step:g}: {shown(p.mean)}</title></circle>"
            )


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
