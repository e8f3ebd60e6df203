"""The learner's idle share: predicted by swarm.pay.model against simulated with the real rollout plane.

bin/python -m benchmarks.capacity --json
bin/python -m benchmarks.capacity --real --json      nine points of a real swarm instead, see capacity_real.py

A grid of max_staleness, broadcast_s / train_step_s and the fleet's rate over the least that the model thinks is enough
(idle 2 %) for its kind of fleet. Where no rate is enough the rate is over R / train_step_s, and the row says so. A cell
simulates STEPS steps after a warm-up of WARMUP_STEPS. KINDS of fleet take turns, so that each meets every bound and
most broadcasts; a version takes `broadcast_steps` to the last of its workers. The error of a cell is predicted minus
simulated, in percentage points. Exit status 1 if the mean of their sizes is above 2 points.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks import Figures, ended, parser_of, said
from benchmarks.learning_swarm import RunFailed
from swarm.pay.fleet import Demand, Lengths, Worker
from swarm.pay.model import NEARLY_BUSY, predict
from swarm.plan.simulate.fixed import run_fixed

TRAIN_STEP_S = 60.0
LENGTHS = Lengths.lognormal(median=1800, sigma=1.0, cap=8192)
STALENESS, BROADCAST_STEPS = (1, 2, 3, 6), (0.05, 0.3, 0.6, 1.0, 1.5, 2.0)
RATIOS = (0.7, 0.85, 1.0, 1.15, 1.3, 1.5)  # Of the least rate
STEPS = 40
WARMUP_STEPS = 20  # Of a fleet whose places are all empty at the start
MEAN_POINTS = 2.0  # Most that the mean error may be

Delayed = tuple[Worker, float]  # A worker and its install in broadcasts


def demand_of(max_staleness: int, groups: int, size: int, train_step_s: float, lengths: Lengths) -> Demand:
    return Demand(
        train_step_s=train_step_s,
        groups_per_step=groups,
        group_size=size,
        publish_every_steps=1,
        max_staleness=max_staleness,
        lengths=lengths,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fleet and the batches that it is to fill. `nth` makes its n-th worker."""

    name: str
    groups_per_step: int
    group_size: int
    nth: Callable[[int], Delayed]

    def demand(self, max_staleness: int) -> Demand:
        return demand_of(max_staleness, self.groups_per_step, self.group_size, TRAIN_STEP_S, LENGTHS)

    def fleet(self, rollouts_per_s: float, broadcast_s: float) -> tuple[list[Worker], list[float]]:
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
    shapes = (_worker(n, 4, 0.2), 0.3), (_worker(n, 24, 0.6), 1.0), (_worker(n, 8, 0.5, lockstep=True), 0.6)
    return shapes[n % 3]


KINDS = (
    Kind(name="single", groups_per_step=64, group_size=1, nth=lambda n: (_worker(n, 1, 0.3), 1.0)),
    Kind(name="places", groups_per_step=32, group_size=8, nth=lambda n: (_worker(n, 8, 0.3), 1.0)),
    Kind(name="lockstep", groups_per_step=24, group_size=16, nth=lambda n: (_worker(n, 16, 0.5, lockstep=True), 1.0)),
    Kind(name="mixed", groups_per_step=48, group_size=8, nth=_mixed),
)


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


def cells(kind: Kind, max_staleness: int, broadcast: float) -> Iterator[Figures]:
    demand, broadcast_s = kind.demand(max_staleness), broadcast * TRAIN_STEP_S
    unit, rate = unit_of(demand, lambda rate: kind.fleet(rate, broadcast_s))
    for ratio in RATIOS:
        workers, install_s = kind.fleet(ratio * rate, broadcast_s)
        began = time.process_time()
        told = predict(demand, workers, install_s)
        predict_s = time.process_time() - began
        found = run_fixed(demand, workers, install_s, steps=STEPS, warmup_steps=WARMUP_STEPS, seed=1)
        yield {
            "kind": kind.name,
            "max_staleness": max_staleness,
            "broadcast_steps": broadcast,
            "unit": unit,
            "unit_rollouts_per_s": rate,
            "ratio": sum(worker.rollouts_per_s for worker in workers) / rate,
            "workers": len(workers),
            "predicted_idle": told.idle_share,
            "simulated_idle": found.idle_share,
            "binds": told.binds,
            "predict_s": predict_s,
            "error_points": 100 * (told.idle_share - found.idle_share),
        }


def grid() -> Iterator[Figures]:
    for i, max_staleness in enumerate(STALENESS):
        for j, broadcast in enumerate(BROADCAST_STEPS):
            yield from cells(KINDS[(i + j) % len(KINDS)], max_staleness, broadcast)


def summary(found: list[Figures]) -> Figures:
    points = sorted(abs(cell["error_points"]) for cell in found)
    return {
        "mean_abs_error_points": statistics.fmean(points),
        "median_abs_error_points": statistics.median(points),
        "p90_abs_error_points": points[int(0.9 * len(points))],
        "max_abs_error_points": points[-1],
        "met": statistics.fmean(points) <= MEAN_POINTS,
        "without_least_rate": sum(cell["unit"] == "R/T" for cell in found),
        "longest_prediction_s": max(cell["predict_s"] for cell in found),
        "cells": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--real", action="store_true", help="nine points against real processes instead, 12 minutes")
    options, began = parser.parse_args(arguments), time.process_time()
    if options.real:
        # Here, since the simulated grid needs no torch.
        from benchmarks import capacity_real

        try:
            whole = capacity_real.run()
        except RunFailed as fault:
            print(fault, file=sys.stderr)
            return 1
        met = whole["real_met"]
    else:
        whole = summary([said(cell) for cell in grid()])
        met = whole["met"]
        names = ("mean", "median", "p90", "max")
        errors = ", ".join(f"{name} {whole[f'{name}_abs_error_points']:.2f}" for name in names)
        print(
            f"{len(whole['cells'])} cells ({whole['without_least_rate']} where no rate is enough): "
            f"error in points {errors}; mean at most {MEAN_POINTS:g}: "
            f"{'met' if met else 'missed'}; {time.process_time() - began:.0f} CPU-s"
        )
    return ended(options, whole, met=met)


if __name__ == "__main__":
    sys.exit(main())
