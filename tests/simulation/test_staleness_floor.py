"""The floor of mean staleness is a schedule that the simulator runs, and no rule is below it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.staleness import Row, clairvoyant, simulate
from benchmarks.staleness_floor import Arrivals, Wanted, schedule
from benchmarks.staleness_sim import RULES, Fleet, Job

PAIR = Row(case="single", max_staleness=4, broadcast=0.3, generate=0.3)

SEEDED = [
    *((replace(PAIR, max_staleness=2, broadcast=broadcast), 1) for broadcast in (0.1, 1.0)),
    (PAIR, 2),
    (replace(PAIR, case="groups"), 1),
    (replace(PAIR, case="serial", max_staleness=8, broadcast=3.0), 1),
]


def named(given: tuple[Row, int]) -> str:
    row, seed = given
    return f"{row.case}-{row.max_staleness}-{row.broadcast:g}-{seed}"


@pytest.mark.parametrize("given", SEEDED, ids=named)
def test_no_rule_that_never_waits_is_below_the_floor(given: tuple[Row, int]) -> None:
    row, seed = given
    floor = clairvoyant(row, steps=25, seed=seed)
    found = floor.figures
    assert found.steps == (5 if row.case == "groups" else 25)
    assert len(found.trained) == len(found.generated) == found.steps * 32 * row.group_size
    assert found.idle_s < 0.001
    assert found.discarded == []
    assert max(found.trained) <= row.max_staleness
    above = 0.1 if row.case == "serial" else 0.03
    assert floor.least <= found.mean_staleness + 1e-9 < floor.least + above
    assert (floor.min_together > floor.least + 0.3) == (row.group_size > 1)
    others = [simulate(row, rule, steps=25, seed=seed) for rule in RULES]
    never_wait = [other.mean_staleness for other in others if not other.idle_s]
    assert found.mean_staleness <= min(never_wait, default=math.inf)
    assert never_wait or row.max_staleness == 2


def test_samples_begin_as_late_as_their_batch_and_their_workers_allow() -> None:
    arrivals = Arrivals(Fleet(workers=1, broadcast=0.25, generate=1.0), 3)
    assert arrivals.times[1:] == [1.25, 2.25, 3.25]
    short, long = (Wanted(time, Job(number=number, index=0)) for number, time in enumerate((0.5, 0.5 + 0.25)))
    plan = schedule([[], [], [short, long]], arrivals, workers=1, max_staleness=2)
    assert [(one.job.number, round(one.start, 3), arrivals.staleness(2, one.start)) for one in plan] == [
        (1, 0.75, 2),
        (0, 1.5, 1),
    ]
