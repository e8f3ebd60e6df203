"""When a learner step is wrong, and what is done: skip it, lower the learning rate, or stop. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from swarm.learner.messages import Alarm, AlarmRules


class Alarms:
    """Judges every optimiser step before it is made and every learner step after it."""

    def __init__(self, rules: AlarmRules) -> None:
        self._rules = rules
        self.learning_rate_scale = 1.0
        """Times which the learning rate is taken."""
        self._raised: list[Alarm] = []

    def is_fit(self, *, gradient_norm: float, mismatch_kl: float | None) -> bool:
        """Whether the optimiser may step on this gradient. `mismatch_kl`: of the step's first minibatch, if known."""
        if math.isfinite(gradient_norm):
            return True
        self._raised.append(
            Alarm(kind="not_finite", reaction="skip", value=gradient_norm, limit=0.0, text="not finite")
        )
        return False

    def stepped(self, figures: Mapping[str, float]) -> tuple[Alarm, ...]:
        """What went off since the last learner step, with what `figures` of the whole step tell."""
        raised, self._raised = tuple(self._raised), []
        return raised
