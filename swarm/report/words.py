"""Words and numbers as the page shows them. What anybody else wrote goes through `text`, always."""

from __future__ import annotations

from html import escape

TEXT_SHOWN = 1500
"""Characters of a prompt or a completion; of an event's field a tenth."""


def text(value: object, most: int = TEXT_SHOWN) -> str:
    """Words of anybody's, escaped: marks that would turn the direction of a line or hide in it are replaced."""
    words = str(value)
    cut = words[:most]
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in cut)
    more = f" [{len(words) - most} characters more]" if len(words) > most else ""
    return escape(plain) + more


def shown(value: float | None) -> str:
    """A value in few characters."""
    if value is None:
        return "-"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.3g}"
