"""What the benchmark of episodes makes of the samplers' accounts. Pure. Times are seconds of one monotonic clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One turn: when its lease came, when its answer was there, and for how long it had a place in the engine."""

    group: str
    index: int
    turn: int
    came_s: float
    ended_s: float
    drawn_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is measured: a stretch of time, all places of all engines, and the CPU seconds of the learner's processes
    in it, the trainer's and rewards' apart."""

    began_s: float
    ended_s: float
    places: int
    learner_cpu_s: float
    environment_cpu_s: float
    trainer_cpu_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


def idle_share(turns: Sequence[Drawn], window: Window) -> float:
    """Return the share of the places' time in which no turn was drawn in them."""
    busy_s = sum(
        max(0.0, min(one.ended_s, window.ended_s) - max(one.ended_s - one.drawn_s, window.began_s)) for one in turns
    )
    return 1 - busy_s / (window.places * window.seconds)


def away_s(turns: Sequence[Drawn], window: Window) -> list[float]:
    """Return for each turn after an episode's first that came in the window, how long ago the one before was drawn. One
    that came to another node for a second time, after the first was lost, is left out."""
    ended = {(one.group, one.index, one.turn): one.ended_s for one in turns}
    came = [one for one in turns if one.turn and window.began_s <= one.came_s < window.ended_s]
    before = [(one, ended.get((one.group, one.index, one.turn - 1))) for one in came]
    return [one.came_s - then for one, then in before if then is not None and then <= one.came_s]


def figures_of(turns: Sequence[Drawn], window: Window) -> dict[str, Any]:
    """Return one run's figures. Shares of 1, seconds, CPU seconds a turn; None where there is nothing to say."""
    ended = [one for one in turns if window.began_s <= one.ended_s < window.ended_s]
    if not ended:
        raise ValueError("no turn ended in the window")
    away = sorted(away_s(turns, window))
    count = len(ended)
    return {
        "idle_share": idle_share(turns, window),
        "turns_per_s": count / window.seconds,
        "queued_s": statistics.median(one.ended_s - one.drawn_s - one.came_s for one in ended),
        "turn_s": statistics.fmean(one.drawn_s for one in ended),
        "away_median_s": statistics.median(away) if away else None,
        "away_95_s": away[int(0.95 * len(away))] if away else None,
        "learner_cpu_s": window.learner_cpu_s / count,
        "environment_cpu_s": window.environment_cpu_s / count,
        "trainer_cpu_s": window.trainer_cpu_s / count,
        "window": asdict(window),
    }


def spread(runs: Sequence[dict[str, Any]], name: str) -> tuple[float, float, float] | None:
    """Return median, least and most of a figure over repeats."""
    found = [run[name] for run in runs if run[name] is not None]
    return (statistics.median(found), min(found), max(found)) if found else None
