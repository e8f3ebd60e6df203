"""What the node makes of the trainer's alarms: an event each, a line now and then, and the end of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from swarm.learner.messages import Alarm

SAY_AGAIN_STEPS = 20
"""Learner steps before an alarm of the same kind and reaction gets another line; each has its event."""


class AlarmLog:
    """Told after every learner step but those that are trained again after a crash: their events are there."""

    def __init__(self, *, emit: Callable[..., None], say: Callable[[str], None]) -> None:
        self._emit = emit
        self._say = say
        self._said_at: dict[tuple[str, str], int] = {}
        self.last: dict[str, Any] | None = None
        """The last alarm, as its event has it."""
        self.stopped_by = ""
        """Why the run is to end; empty while it is not."""

    def told(self, alarms: Sequence[Alarm], *, step: int) -> bool:
        """Note what went off in learner step `step`; True if the run is to end."""
        for alarm in alarms:
            self._tell(alarm, step)
        return bool(self.stopped_by)

    def _tell(self, alarm: Alarm, step: int) -> None:
        shown = f"{alarm.value:.3g}, limit {alarm.limit:.3g}" if math.isfinite(alarm.value) else "not a number"
        self.last = {
            "alarm": alarm.kind,
            "reaction": alarm.reaction,
            # JSON has no NaN.
            "value": alarm.value if math.isfinite(alarm.value) else None,
            "limit": alarm.limit,
            "step": step,
        }
        self._emit("alarm", **self.last, text=alarm.text)
        if alarm.reaction == "stop":
            self.stopped_by = alarm.text
        name = (alarm.kind, alarm.reaction)
        if name not in self._said_at or step - self._said_at[name] >= SAY_AGAIN_STEPS:
            self._said_at[name] = step
            self._say(f"step {step}: alarm {alarm.kind} ({shown}): {alarm.text}")
