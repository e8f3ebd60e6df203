"""Curves of rewards as an SVG file, in the reader's light or dark colours; they can be read without colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Steps and values of each curve, by its name."""

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
HEAD, FOOT = 60, 50  # Above the first chart; below each
TICKS = 4
DASHES = ("none", "7 4", "2 3", "9 3 2 3", "1 2", "12 4")  # Besides the colours: not everybody sees or prints these

STYLE = """
:root { --paper: #ffffff; --ink: #1d1f21; --dim: #5b6168; --line: #d5d8dc; --grid: #e8eaed;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #aa4499; --c4: #8a6d00; --c5: #56707f; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e6e8ea; --dim: #a2a8b0; --line: #3b4047;
  --grid: #292d33; --c0: #56b4e9; --c1: #f0934e; --c2: #3fc79a; --c3: #d98cc6; --c4: #e0c341; --c5: #9fb6c3; } }
svg text { fill: var(--dim); font-size: 12px; }
.grid { stroke: var(--grid); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
""" + "\n".join(
    f".line.c{n} {{ stroke: var(--c{n}); }} text .c{n} {{ fill: var(--c{n}); }}" for n in range(len(DASHES))
)
"""The colours of curves are Okabe and Ito's, which nearly everybody can tell apart."""


def picture(title: str, said: str, charts: Mapping[str, Curves]) -> str:
    """An SVG file: a title, a line below it, and the charts below one another, as many curves in each as there are
    DASHES. Values from 0 to 1 are always visible."""
    height = HEAD + len(charts) * (HEIGHT + FOOT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" fill="var(--paper)"/>',
        f'<text x="{TOP}" y="24" style="font-size: 16px">{escape(title)}</text>',
        f'<text x="{TOP}" y="44">{escape(said)}</text>',
    ]
    for number, (name, curves) in enumerate(charts.items()):
        y = HEAD + number * (HEIGHT + FOOT)
        keys = [f'<tspan class="c{n}" dx="14">&#9679;</tspan> {escape(one)}' for n, one in enumerate(curves)]
        parts += [
            f'<text x="{TOP}" y="{y + 14}">{escape(name)}{"".join(keys[: len(DASHES)])}</text>',
            f'<svg y="{y + 20}" width="{WIDTH}" height="{HEIGHT}">',
            *_drawn(curves),
            "</svg>",
        ]
    return "\n".join([*parts, "</svg>", ""])


def _drawn(curves: Curves) -> Iterator[str]:
    points = [point for curve in curves.values() for point in curve] or [(1.0, 1.0)]
    last, highest = max(step for step, _ in points), max(1.0, *(value for _, value in points))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x(step: float) -> str:
        return f"{LEFT + (right - LEFT) * step / last:.1f}"

    def y(value: float) -> str:
        return f"{bottom - (bottom - TOP) * value / highest:.1f}"

    for share in (tick / TICKS for tick in range(TICKS + 1)):
        at = y(share * highest)
        yield f'<path class="grid" d="M{LEFT} {at}H{right}"/>'
        yield f'<text x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end">{share * highest:.3g}</text>'
        yield f'<text x="{x(share * last)}" y="{bottom + 16}" text-anchor="middle">{share * last:g}</text>'
    yield f'<text x="{(LEFT + right) / 2:g}" y="{HEIGHT - 6}" text-anchor="middle">learner step</text>'
    for n, ((name, curve), dash) in enumerate(zip(curves.items(), DASHES, strict=False)):
        path = "L".join(f"{x(step)} {y(value)}" for step, value in curve)
        yield f'<path class="line c{n}" stroke-dasharray="{dash}" d="M{path}"><title>{escape(name)}</title></path>'
