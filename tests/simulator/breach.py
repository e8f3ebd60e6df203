"""What a checker raises, with the command that shows it again."""

from __future__ import annotations


class InvariantBreach(Exception):
    """A node did what it must never do. The message says what, when, and how to see it again."""

    def __init__(self, rule: str, what: str, *, replay: str, now: float) -> None:
        super().__init__(f"{rule}: {what} ({now:.6f} virtual seconds)\nreplay: {replay}")
