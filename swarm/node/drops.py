"""What the learner says of rollouts that it accepted from this node and did not train on."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.rollout.messages import DroppedRollouts

SAID_AGAIN_S = 60.0
"""Least time between two lines: a run that drops some in every step is not to fill the terminal."""


class Drops:
    """The learner's counts by reason, and when to speak of them. `counts` are those since the learner started."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._said: dict[str, int] = {}
        self._said_at: float | None = None

    def hear(self, told: Iterable[DroppedRollouts], *, now: float) -> str | None:
        """Take the newest counts. A line for the person at the terminal if they grew since the last one was said, at
        most one in SAID_AGAIN_S; `now` in monotonic seconds."""
        # They are shown on a terminal.
        self.counts = {"".join(c if c.isprintable() else "?" for c in one.reason): one.rollouts for one in told}
        # A learner that started again counts from zero.
        self._said = {reason: min(count, self.counts.get(reason, 0)) for reason, count in self._said.items()}
        grown = {reason: count - self._said.get(reason, 0) for reason, count in sorted(self.counts.items())}
        grown = {reason: more for reason, more in grown.items() if more}
        if not grown or (self._said_at is not None and now - self._said_at < SAID_AGAIN_S):
            return None
        self._said, self._said_at = dict(self.counts), now
        by_reason = ", ".join(reason if len(grown) == 1 else f"{more} {reason}" for reason, more in grown.items())
        return f"the learner dropped {sum(grown.values())} of our rollouts: {by_reason}"
