"""Estimates from the last few observations: the median, and how far it can be trusted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

HALF_TRUSTED = 4
"""Observations after which an estimate is trusted by half if they agree: a median of fewer is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure. `confidence` is 0 for a start value, and nears 1 with many `samples` that agree."""

    value: float
    confidence: float
    samples: int


def confidence(values: Sequence[float]) -> float:
    """n / (n + HALF_TRUSTED), less the median deviation over the median (at most all of it)."""
    if not values:
        return 0.0
    middle = median(values)
    if middle == 0:
        spread = 0.0 if not any(values) else 1.0
    else:
        spread = min(1.0, median(abs(value - middle) for value in values) / abs(middle))
    return len(values) / (len(values) + HALF_TRUSTED) * (1.0 - spread)


class Window:
    """The last `size` observations of one figure, all finite."""

    __slots__ = ("_values",)

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def add(self, value: float) -> None:
        assert math.isfinite(value)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> Sequence[float]:
        return self._values

    @property
    def median(self) -> float | None:
        """None without observations."""
        return median(self._values) if self._values else None

    def estimate(self, start: float) -> Estimate:
        """The median, or `start` without confidence where nothing was observed."""
        if not self._values:
            return Estimate(value=start, confidence=0.0, samples=0)
        return Estimate(value=median(self._values), confidence=confidence(self._values), samples=len(self._values))
