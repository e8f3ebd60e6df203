"""The figures of the learning benchmark: of one run from its steps, of one row from the runs of its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from swarm.report.charts import Chart, Curve, picture
from swarm.report.figures import Column
from swarm.types import Freshness

Mode = Literal["baseline", "forced", "swarm"]
MODES: tuple[Mode, ...] = ("baseline", "forced", "swarm")

LAST_STEPS = 10
"""The reward at the end is the mean of so many steps: one batch alone is noisy to about 0.01."""

LEARNED_REWARD = 0.9
"""The reward that is waited for: nearly all copies are whole."""

CURVE_EVERY = 10
"""Steps between two points of the curves in the JSON object."""

Figures = dict[str, Any]


class Case(NamedTuple):
    """What a row is of."""

    mode: Mode
    max_staleness: int
    objective: str
    freshness: Freshness = "off"
    adapter: int = 0
    """Its rank; 0 if the whole model is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One learner step. `at_s`: when its training was done; staleness is in steps, over the rollouts of its batch."""

    at_s: float
    reward: float
    staleness_mean: float
    staleness_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: two steps at least, and the greedy exact match of the last version on held-out prompts."""

    steps: Sequence[Step]
    accuracy: float


def step_of(metrics: dict[str, Any], at_s: float) -> Step:
    """A step from the trainer's metrics."""
    return Step(
        at_s=at_s,
        reward=metrics["reward"],
        staleness_mean=metrics["staleness/mean"],
        staleness_max=metrics["staleness/max"],
    )


def figures_of(run: Run) -> Figures:
    """The figures of one run. The clock runs from the end of its first step, so that no start of a process counts."""
    rewards = [step.reward for step in run.steps]
    seconds = run.steps[-1].at_s - run.steps[0].at_s
    learned = next((number for number, reward in enumerate(rewards) if reward >= LEARNED_REWARD), None)
    return {
        "accuracy": run.accuracy,
        "reward_last10": statistics.fmean(rewards[-LAST_STEPS:]),
        "reward_per_step": statistics.fmean(rewards),
        "reward_per_s": sum(rewards[1:]) / seconds,
        "staleness_mean": statistics.fmean(step.staleness_mean for step in run.steps),
        "staleness_max": max(step.staleness_max for step in run.steps),
        "seconds": seconds,
        "steps_to_reward_0_9": math.inf if learned is None else learned + 1,
        "seconds_to_reward_0_9": math.inf if learned is None else run.steps[learned].at_s - run.steps[0].at_s,
        "curve": rewards[CURVE_EVERY - 1 :: CURVE_EVERY],
    }


def row(case: Case, runs: Sequence[Run]) -> Figures:
    """Medians over the runs, of which there is one at least; the largest for staleness_max. None is never."""
    found = [figures_of(run) for run in runs]
    medians = {name: _finite(statistics.median(f[name] for f in found)) for name in found[0] if name != "curve"}
    return {
        **case._asdict(),
        "runs": len(runs),
        **medians,
        "accuracy_min": min(f["accuracy"] for f in found),
        "accuracy_max": max(f["accuracy"] for f in found),
        "staleness_max": max(f["staleness_max"] for f in found),
        "curve": [statistics.median(points) for points in zip(*(f["curve"] for f in found), strict=True)],
    }


def table(rows: Sequence[Figures]) -> list[str]:
    """Lines for people."""
    titles = ("accuracy (range)", "last 10", "per step", "per s", "staleness", "s", "to 0.9: steps", "s")
    widths = (23, 8, 9, 7, 12, 7, 14, 7)
    head = "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))
    return [
        f"{'mode':9}{'S':>3}  {'freshness':10}{'objective':14}{'trained':10}{head}",
        *(_line(found, widths) for found in rows),
    ]


def plot(rows: Sequence[Figures]) -> str:
    """An .svg picture of the rewards of swarms over their steps, for each freshness."""
    swarms = [found for found in rows if found["mode"] == "swarm"]
    charts: list[Chart] = []
    for fresh in get_args(Freshness):
        # At S = 0 both are the same, and in both charts a bound has the same colour.
        shown = [found for found in swarms if found["freshness"] == fresh or not found["max_staleness"]]
        charts.append(Chart(title=fresh, unit="", curves=[_curve(found) for found in shown], floor=0, ceiling=1))
    runs = min(found["runs"] for found in swarms)
    said = f"reward over learner steps, median of {runs} runs; in brackets the mean age of the data in steps"
    return picture("What staleness costs, with freshness adaptive and off", said, charts)


def _curve(found: Figures) -> Curve:
    points = enumerate(found["curve"], 1)
    column = Column.of((CURVE_EVERY * number, reward) for number, reward in points)
    return Curve(name=f"S = {found['max_staleness']} ({found['staleness_mean']:.1f})", column=column)


def _line(found: Figures, widths: Sequence[int]) -> str:
    cells = (
        f"{found['accuracy']:.3f} ({found['accuracy_min']:.3f}-{found['accuracy_max']:.3f})",
        f"{found['reward_last10']:.3f}",
        f"{found['reward_per_step']:.3f}",
        f"{found['reward_per_s']:.2f}",
        f"{found['staleness_mean']:.2f} / {found['staleness_max']:.0f}",
        f"{found['seconds']:.1f}",
        _or_never(found["steps_to_reward_0_9"], ".0f"),
        _or_never(found["seconds_to_reward_0_9"], ".1f"),
    )
    shown = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    what = f"{found['objective']:14}{trained(found['adapter']):10}"
    return f"{found['mode']:9}{found['max_staleness']:>3}  {found['freshness']:10}{what}{shown}"


def trained(rank: int) -> str:
    return f"rank {rank}" if rank else "all"


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _or_never(value: float | None, form: str) -> str:
    return "never" if value is None else format(value, form)
