"""What a simulated run of rollouts shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Figures:
    """Counted over all lives of the learner; a step that is trained again counts once."""

    steps: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    trained: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    evaluations: int = 0
    samples_lost: int = 0
    crashes: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def step(self, ages: Sequence[int]) -> None:
        """Count a learner step on rollouts of these ages."""
        self.steps += 1
        self.trained += len(ages)
        self.staleness_sum += sum(ages)
        self.staleness_max = max(self.staleness_max, *ages)

    @property
    def idle_share(self) -> float:
        """Of the time since the first batch, how much the learner waited for the next one."""
        return self.idle_s / (self.busy_s + self.idle_s)
