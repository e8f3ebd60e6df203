"""A run's learning curves as one SVG file, from its metrics and held-out evaluations. No library needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 44

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart: values in 0..1 over steps."""

    name: str
    color: str
    points: Points
    dots: bool = False


def learning_chart(title: str, curves: Sequence[Curve]) -> str:
    """An SVG of curves in 0..1 over learner steps."""
    last = max((x for curve in curves for x, _ in curve.points), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" fill="#222222">{escape(title)}</text>',
        *(_grid_line(value / 4) for value in range(5)),
        *(_tick(last * value / 4, last) for value in range(5)),
        f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#555555">learner step</text>',
    ]
    for place, curve in enumerate(curves):
        parts += [*_line(curve, last), *_legend(curve, place)]
    return "\n".join([*parts, "</svg>", ""])


def _x(step: float, last: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * step / last, 1)


def _y(value: float) -> float:
    return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(1.0, max(0.0, value))), 1)


def _grid_line(value: float) -> str:
    y = _y(value)
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#dddddd"/>'
        f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#555555">{value:.2f}</text>'
    )


def _tick(step: float, last: float) -> str:
    return f'<text x="{_x(step, last)}" y="{HEIGHT - 26}" text-anchor="middle" fill="#555555">{step:.0f}</text>'


def _line(curve: Curve, last: float) -> list[str]:
    places = [(_x(step, last), _y(value)) for step, value in curve.points]
    path = " ".join(f"{x},{y}" for x, y in places)
    line = f'<polyline points="{path}" fill="none" stroke="{curve.color}" stroke-width="2"/>'
    dots = [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{curve.color}"/>' for x, y in places] if curve.dots else []
    return [line, *dots]


def _legend(curve: Curve, place: int) -> list[str]:
    x = LEFT + 170 * place
    return [
        f'<rect x="{x}" y="{TOP - 12}" width="14" height="4" fill="{curve.color}"/>',
        f'<text x="{x + 20}" y="{TOP - 6}" fill="#222222">{escape(curve.name)}</text>',
    ]
