"""The figures of the arithmetic benchmark: the held-out curve of a run from its files, and whether it rose."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NORMAL_95 = 1.959964
"""Two-sided 95 % of the normal distribution."""

RISEN_Z = 2.326348
"""One-sided 1 %: a curve that stands still is called risen once in a hundred runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One held-out round. `minutes` since the first one; `pass_at_1` is the share of right answers to `prompts`
    questions. Of the training batches since the round before: mean reward and mean completion length in tokens."""

    step: int
    minutes: float
    pass_at_1: float
    prompts: int
    reward: float | None
    tokens: float | None

    @property
    def interval(self) -> tuple[float, float]:
        """As if each question had been answered once: several samples of one are no independent ones."""
        return wilson(self.pass_at_1, self.prompts)


def read_curve(run_dir: Path) -> list[Point]:
    """The rounds of a run so far, however it ended."""
    rounds = [event for event in _lines(run_dir / "events.jsonl") if event["kind"] == "evaluated"]
    steps = _lines(run_dir / "metrics.jsonl")
    points: list[Point] = []
    for before, found in zip([None, *rounds], rounds, strict=False):
        since = before["version"] if before is not None else 0
        trained = [step for step in steps if since < step["step"] <= found["version"]]
        points.append(
            Point(
                step=found["version"],
                minutes=(found["time"] - rounds[0]["time"]) / 60,
                pass_at_1=found["exact_match"],
                prompts=found["prompts"],
                reward=_mean([step["reward"] for step in trained]),
                tokens=_mean([step["completions/mean_length"] for step in trained]),
            )
        )
    return points


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % confidence interval of a share of `count`. Wilson 1927, the score interval."""
    square = NORMAL_95**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = NORMAL_95 / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return middle - half, middle + half


def two_proportion_z(first: float, last: float, count: int) -> float:
    """The z statistic of last - first, both shares of `count`, with the pooled variance.

    Both are of the same questions; taken for independent they are harder to tell apart, so it errs on the safe side.
    """
    pooled = (first + last) / 2
    deviation = math.sqrt(2 * pooled * (1 - pooled) / count)
    return (last - first) / deviation if deviation else 0.0


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """What the JSON line says of a curve of one round at least."""
    first, last = points[0], points[-1]
    z = two_proportion_z(first.pass_at_1, last.pass_at_1, first.prompts)
    return {
        "first": first.pass_at_1,
        "first_interval": first.interval,
        "last": last.pass_at_1,
        "last_interval": last.interval,
        "prompts": first.prompts,
        "steps": last.step,
        "minutes": last.minutes,
        "z": z,
        "risen": z > RISEN_Z,
        "curve": [asdict(point) for point in points],
    }


def line_of(point: Point) -> str:
    """A line of the table under HEAD."""
    low, high = point.interval
    shown = f"{point.step:>6}{point.minutes:>9.1f}{point.pass_at_1:>10.3f}   {low:.3f} to {high:.3f}"
    if point.reward is None or point.tokens is None:
        return shown
    return f"{shown}{point.reward:>9.3f}{point.tokens:>8.1f}"


HEAD = f"{'step':>6}{'minutes':>9}{'pass@1':>10}{'95 % interval':>17}{'reward':>9}{'tokens':>8}"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written, and may not be there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
