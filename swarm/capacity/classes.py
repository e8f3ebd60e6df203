"""Workers as a few classes of units, and a large swarm as a small one that behaves like it: the input of a recursion.

Merging: workers whose places are about equally fast and which install at about the same time form one class. Thinning:
if a step takes more than MAX_ROLLOUTS, groups and places are divided by the same number. Units are whole, so what a
class lacks or has in excess is passed on to the next one, which is its nearest. In the end one factor makes all units
faster or slower: the summed rate is exact, the time of a sample nearly so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.capacity.fleet import Demand, Worker
from swarm.capacity.recursion import UnitClass

LIKE_PLACES = 0.1
"""Relative difference between two places' times within a class: no rate is known to better than a tenth"""

LIKE_INSTALL = 0.05
"""Difference between two installs in training steps: it can change the idle share by only a small part of that."""

MAX_CLASSES = 24  # More classes are merged more coarsely: each one costs prediction time

MAX_ROLLOUTS = 256
"""Rollouts of a thinned step: small enough for thirty steps in the time of a prediction, large enough that each step
still waits for the last of many."""

MIN_GROUPS = 16  # Fewest groups of a thinned step, whatever their size: with fewer, one group would decide the step
Delayed = tuple[Worker, float]  # A worker and its install time in seconds


@dataclass(frozen=True, slots=True)
class _Share:
    """A class before its units are made whole."""

    units: float
    samples: int
    longest_of: int
    unit_s: float
    install_s: float


def thinned(
    demand: Demand, workers: Sequence[Worker], install_s: Sequence[float], *, scale: float = 1.0
) -> tuple[Demand, tuple[UnitClass, ...]]:
    """Return a demand and classes that behave alike and take less time to follow. Each worker counts `scale` times."""
    groups = min(demand.groups_per_step, max(MIN_GROUPS, MAX_ROLLOUTS // demand.group_size))
    part = groups / demand.groups_per_step
    shares = [_share(members, scale=scale * part, part=part) for members in alike(demand, workers, install_s)]
    rate = scale * part * math.fsum(worker.rollouts_per_s for worker in workers)
    return replace(demand, groups_per_step=groups), _whole(shares, rate=rate)


def alike(demand: Demand, workers: Sequence[Worker], install_s: Sequence[float]) -> list[list[Delayed]]:
    """Return the workers and installs by class: at most MAX_CLASSES, or 4 for each size of lockstep engine."""
    coarse = 1.0
    while True:
        found: dict[tuple[int, int, int], list[Delayed]] = {}
        for worker, delay_s in zip(workers, install_s, strict=True):
            key = (
                worker.samples_at_once if worker.lockstep else 0,
                round(math.log(worker.place_s) / (coarse * LIKE_PLACES)),
                round(delay_s / (coarse * LIKE_INSTALL * demand.train_step_s)),
            )
            found.setdefault(key, []).append((worker, delay_s))
        if len(found) <= max(MAX_CLASSES, len({key[0] for key in found}) * 4):
            return [found[key] for key in sorted(found)]
        coarse *= 2


def _share(workers: Sequence[Delayed], *, scale: float, part: float) -> _Share:
    """Make one class. A unit is a place of a continuous engine, or a lockstep engine, with fewer samples if thinned."""
    rate = math.fsum(worker.rollouts_per_s for worker, _ in workers)
    places = sum(worker.samples_at_once for worker, _ in workers)
    first, _ = workers[0]
    samples = max(1, round(part * first.samples_at_once)) if first.lockstep else 1
    return _Share(
        units=scale * places / samples,
        samples=samples,
        longest_of=first.samples_at_once if first.lockstep else 1,
        unit_s=places / rate,
        install_s=math.fsum(worker.rollouts_per_s * delay_s for worker, delay_s in workers) / rate,
    )


def _whole(shares: Sequence[_Share], *, rate: float) -> tuple[UnitClass, ...]:
    """Make units whole at the summed `rate`. Rounding errors carry over to the next class and distort none."""
    found: list[tuple[_Share, int]] = []
    carried = 0.0
    for share in shares:
        carried += share.units
        units = round(carried)
        carried -= units
        if units > 0:
            found.append((share, units))
    if not found:
        found = [(max(shares, key=lambda share: share.units), 1)]
    factor = sum(units * share.samples / share.unit_s for share, units in found) / rate
    return tuple(
        UnitClass(
            units=units,
            samples=share.samples,
            longest_of=share.longest_of,
            unit_s=share.unit_s * factor,
            install_s=share.install_s,
        )
        for share, units in found
    )
