"""The timeline of one version as SVG: a lane for the learner and each receiver."""

from __future__ import annotations

from html import escape

Lanes = dict[str, list[tuple[str, float, float]]]

COLOURS = {
    "stage": "#7b61a8",
    "encode": "#3572b0",
    "send": "#9ec3e6",
    "receive": "#9ec3e6",
    "apply": "#d98a2b",
    "install": "#3f9c5a",
    "draw": "#222222",
}
WIDTH, LEFT, LANE, BAR, TOP = 860, 100, 30, 20, 40


def picture(lanes: Lanes, title: str) -> str:
    """Return the SVG. Times are in seconds after the optimiser's step."""
    end_s = max(end for parts in lanes.values() for _, _, end in parts) or 1.0
    scale = (WIDTH - LEFT - 20) / end_s
    height = TOP + LANE * len(lanes) + 60
    rows = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}: seconds after the step</text>']
    for row, (name, parts) in enumerate(lanes.items()):
        y = TOP + row * LANE
        rows.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for what, begin, end in parts:
            x, width = LEFT + begin * scale, max(1.0, (end - begin) * scale)
            rows.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[what]}">'
                f"<title>{what} {begin:.2f} to {end:.2f} s</title></rect>"
            )
    y = TOP + LANE * len(lanes)
    for tick in range(6):
        at = end_s * tick / 5
        rows.append(f'<text x="{LEFT + at * scale:.1f}" y="{y + 14}" text-anchor="middle">{at:.1f}</text>')
    for place, (what, colour) in enumerate(COLOURS.items()):
        x = LEFT + place * 105
        rows.append(f'<rect x="{x}" y="{y + 28}" width="12" height="12" fill="{colour}"/>')
        rows.append(f'<text x="{x + 17}" y="{y + 39}">{what}</text>')
    body = "\n".join(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
