"""The learner's idle share: predicted by swarm.pay.model against simulated with the real rollout plane.

bin/python -m benchmarks.capacity --json
bin/python -m benchmarks.capacity --staleness 2 --broadcast 0.3,1 --steps 100
bin/python -m benchmarks.capacity --freshness off --json
bin/python -m benchmarks.capacity --real --json      nine points of a real swarm instead, see capacity_real.py

A grid of max_staleness, broadcast_s / train_step_s and the fleet's rate over the least that the model thinks is enough
(idle 2 %) for its kind of fleet. Where no rate is enough the rate is over R / train_step_s, and the row says so. A cell
simulates `--steps` steps after a warm-up of 20 (swarm/plan/simulate/fixed.py, which shares no code with the model but
the mean of the longest of a batch).

Four kinds of fleet take turns, so that each meets every bound and most broadcasts; a version takes `broadcast` to the
last of its workers. Lengths are lognormal with sigma 1 and clipped at 4.5 times the median, as in practice.

    single    1 place each, groups of 1: batches of 64
    places    continuous engines of 8 places, groups of 8
    lockstep  engines of 16 samples that begin and end together, groups of 16
    mixed     continuous of 4 and 24 places, lockstep of 8, three speeds, installs from 0.3 to 1 broadcast, groups of 8

The error of a cell is predicted minus simulated, in percentage points. Exit status 1 if the mean of their sizes is
above 2 points.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args

from benchmarks.learning_swarm import RunFailed
from swarm.pay.fleet import Demand, Lengths, Worker
from swarm.pay.model import NEARLY_BUSY, Prediction, predict
from swarm.plan.simulate.fixed import run_fixed
from swarm.plan.simulate.learner import CapacityFigures
from swarm.types import Freshness

TRAIN_STEP_S = 60.0

LENGTHS = Lengths.lognormal(median=1800, sigma=1.0, cap=8192)

MEAN_POINTS = 2.0
"""Most that the mean error may be."""

Delayed = tuple[Worker, float]
"""A worker and its install in broadcasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fleet and the batches that it is to fill. `nth` makes its n-th worker."""

    name: str
    groups_per_step: int
    group_size: int
    nth: Callable[[int], Delayed]

    def demand(self, max_staleness: int, freshness: Freshness = "adaptive") -> Demand:
        return Demand(
            train_step_s=TRAIN_STEP_S,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            publish_every_steps=1,
            max_staleness=max_staleness,
            lengths=LENGTHS,
            freshness=freshness,
        )

    def fleet(self, rollouts_per_s: float, broadcast_s: float) -> tuple[list[Worker], list[float]]:
        """Workers whose summed rate comes nearest, at least one, and the install of each in seconds."""
        workers: list[Worker] = []
        install_s: list[float] = []
        rate = 0.0
        while not workers or rate + 0.5 * self.nth(len(workers))[0].rollouts_per_s < rollouts_per_s:
            worker, delay = self.nth(len(workers))
            workers.append(worker)
            install_s.append(delay * broadcast_s)
            rate += worker.rollouts_per_s
        return workers, install_s


def _worker(n: int, places: int, place_steps: float, *, lockstep: bool = False) -> Worker:
    """`place_steps`: what a place takes for a sample, or a lockstep engine for a batch, in training steps."""
    rate = places / (place_steps * TRAIN_STEP_S)
    return Worker(name=f"w{n}", rollouts_per_s=rate, samples_at_once=places, lockstep=lockstep)


def _mixed(n: int) -> Delayed:
    shape = n % 3
    if shape == 0:
        return _worker(n, 4, 0.2), 0.3
    if shape == 1:
        return _worker(n, 24, 0.6), 1.0
    return _worker(n, 8, 0.5, lockstep=True), 0.6


KINDS = (
    Kind(name="single", groups_per_step=64, group_size=1, nth=lambda n: (_worker(n, 1, 0.3), 1.0)),
    Kind(name="places", groups_per_step=32, group_size=8, nth=lambda n: (_worker(n, 8, 0.3), 1.0)),
    Kind(name="lockstep", groups_per_step=24, group_size=16, nth=lambda n: (_worker(n, 16, 0.5, lockstep=True), 1.0)),
    Kind(name="mixed", groups_per_step=48, group_size=8, nth=_mixed),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid. `ratio` is the fleet's rate over `unit`, which is "least" or "R/T"; shares of 1."""

    kind: str
    max_staleness: int
    broadcast_steps: float
    unit: str
    unit_rollouts_per_s: float
    ratio: float
    workers: int
    predicted_idle: float
    simulated_idle: float
    binds: str
    predict_s: float

    @property
    def error_points(self) -> float:
        return 100 * (self.predicted_idle - self.simulated_idle)


PLENTY = 32.0  # Times R / T: if this rate is not enough, no rate is


def unit_of(demand: Demand, fleet: Callable[[float], tuple[list[Worker], list[float]]]) -> tuple[str, float]:
    """What rates are given in: the least that the model thinks is enough for such a fleet, where there is one."""
    once = demand.rollouts_per_step / demand.train_step_s

    def is_enough(rate: float) -> bool:
        return predict(demand, *fleet(rate)).idle_share <= NEARLY_BUSY

    if not is_enough(PLENTY * once):
        return "R/T", once
    low, high = once / 2, PLENTY * once
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return "least", high


def cells(
    kind: Kind,
    max_staleness: int,
    broadcast: float,
    ratios: Sequence[float],
    *,
    freshness: Freshness,
    steps: int,
) -> Iterator[Cell]:
    """The cells of one bound and one broadcast."""
    demand, broadcast_s = kind.demand(max_staleness, freshness), broadcast * TRAIN_STEP_S
    unit, rate = unit_of(demand, lambda rate: kind.fleet(rate, broadcast_s))
    for ratio in ratios:
        workers, install_s = kind.fleet(ratio * rate, broadcast_s)
        began = time.process_time()
        told = predict(demand, workers, install_s)
        predict_s = time.process_time() - began
        found = run_fixed(demand, workers, install_s, steps=steps, seed=1)
        yield _cell(
            kind, demand, told, found, broadcast=broadcast, unit=(unit, rate), workers=workers, predict_s=predict_s
        )


def _cell(
    kind: Kind,
    demand: Demand,
    told: Prediction,
    found: CapacityFigures,
    *,
    broadcast: float,
    unit: tuple[str, float],
    workers: Sequence[Worker],
    predict_s: float,
) -> Cell:
    return Cell(
        kind=kind.name,
        max_staleness=demand.max_staleness,
        broadcast_steps=broadcast,
        unit=unit[0],
        unit_rollouts_per_s=unit[1],
        ratio=sum(worker.rollouts_per_s for worker in workers) / unit[1],
        workers=len(workers),
        predicted_idle=told.idle_share,
        simulated_idle=found.idle_share,
        binds=told.binds,
        predict_s=predict_s,
    )


HEADER = (
    "| fleet | S | T_bcast / T | unit | rate / unit | workers | idle, predicted | simulated | error | binds |\n"
    + "|---" * 10
    + "|"
)


def line(cell: Cell) -> str:
    """One row of the table: shares in percent, predicted before simulated."""
    columns = [
        cell.kind,
        cell.max_staleness,
        f"{cell.broadcast_steps:g}",
        f"{cell.unit} {cell.unit_rollouts_per_s:.2f}/s",
        f"{cell.ratio:.2f}",
        cell.workers,
        f"{100 * cell.predicted_idle:.1f}",
        f"{100 * cell.simulated_idle:.1f}",
        f"{cell.error_points:+.1f}",
        cell.binds,
    ]
    return "| " + " | ".join(str(column) for column in columns) + " |"


def grid(options: argparse.Namespace) -> Iterator[Cell]:
    """Every cell that is asked for; kinds take turns along bounds and broadcasts."""
    for i, max_staleness in enumerate(options.staleness):
        for j, broadcast in enumerate(options.broadcast):
            kind = KINDS[(i + j) % len(KINDS)]
            yield from cells(
                kind, max_staleness, broadcast, options.ratios, freshness=options.freshness, steps=options.steps
            )


def summary(found: Sequence[Cell]) -> dict[str, Any]:
    """The errors: mean, median, of nine in ten cells, and the largest."""
    points = sorted(abs(cell.error_points) for cell in found)
    return {
        "mean_abs_error_points": statistics.fmean(points),
        "median_abs_error_points": statistics.median(points),
        "p90_abs_error_points": points[int(0.9 * len(points))],
        "max_abs_error_points": points[-1],
        "met": statistics.fmean(points) <= MEAN_POINTS,
        "without_least_rate": sum(cell.unit == "R/T" for cell in found),
        "longest_prediction_s": max(cell.predict_s for cell in found),
        "cells": [asdict(cell) | {"error_points": cell.error_points} for cell in found],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="learner steps that are simulated for each cell")
    parser.add_argument("--staleness", type=_list(int), default=[1, 2, 3, 6], help="bounds, 1,2,3,6")
    parser.add_argument("--broadcast", type=_list(float), default=[0.05, 0.3, 0.6, 1.0, 1.5, 2.0], help="in steps")
    parser.add_argument(
        "--ratios", type=_list(float), default=[0.7, 0.85, 1.0, 1.15, 1.3, 1.5], help="of the least rate"
    )
    parser.add_argument("--freshness", choices=get_args(Freshness), default="adaptive", help="as the setting of lead")
    parser.add_argument("--real", action="store_true", help="nine points against real processes instead, 12 minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(arguments)
    if min(options.steps, *options.ratios) <= 0 or min(*options.broadcast, *options.staleness, 0) < 0:
        parser.error("steps and ratios are positive, broadcasts and bounds are not negative")
    return options


def _list(of: type) -> Any:
    return lambda text: [of(one) for one in text.split(",")]


def _real(*, as_json: bool) -> int:
    # Here, since the simulated grid needs no torch.
    from benchmarks import capacity_real

    try:
        whole = capacity_real.run(say=partial(print, flush=True))
    except RunFailed as fault:
        print(fault, file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(whole))
    return 0 if whole["real_met"] else 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.real:
        return _real(as_json=options.json)
    began = time.process_time()
    print(HEADER)
    found = []
    for cell in grid(options):
        found.append(cell)
        print(line(cell), flush=True)
    whole = summary(found)
    names = ("mean", "median", "p90", "max")
    errors = ", ".join(f"{name} {whole[f'{name}_abs_error_points']:.2f}" for name in names)
    print(
        f"{len(found)} cells ({whole['without_least_rate']} where no rate is enough): error in points {errors}; mean "
        f"at most {MEAN_POINTS:g}: {'met' if whole['met'] else 'missed'}; "
        f"{time.process_time() - began:.0f} CPU-s"
    )
    if options.json:
        print(json.dumps(whole))
    return 0 if whole["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
