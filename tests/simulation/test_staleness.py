"""The benchmark of staleness: hard cases, in which the aim adapts and costs next to nothing, and the floor of mean
staleness, which is a schedule that the simulator runs, and no rule is below it."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from benchmarks.staleness import Row, clairvoyant, measure_case, simulate, simulate_case
from benchmarks.staleness_floor import Arrivals, Wanted, schedule
from benchmarks.staleness_sim import RULES, Figures, Fleet, Job
from swarm.rollout.plane import rules


def row_of(case: str) -> Row:
    return Row(case=case, max_staleness=4, broadcast=0.3, generate=0.3)


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("halved", 200),
        *(pytest.param(*more, marks=pytest.mark.long) for more in (("doubled", 120), ("mixed", 120), ("places", 120))),
    ],
)
def test_the_aim_makes_data_younger_and_costs_next_to_nothing(case: str, steps: int) -> None:
    """Half of `halved` is long enough for the aim to fall below what half of the fleet needs."""
    found = measure_case(row_of(case), steps=steps)
    ours, off = found["rules"].values()
    assert found["missed"] == []
    assert ours["mean_staleness"] < off["mean_staleness"] - 1
    assert (found["recovery_batches"] is None) == (case in ("mixed", "places"))


def test_the_learner_waits_no_longer_for_rounds_of_held_out_prompts_than_they_take() -> None:
    """Two of four batches each, which go first: 8 of 60 steps for this fleet, less what was drawn before."""
    found = measure_case(row_of("bursts"), steps=120)
    ours, off = found["rules"].values()
    assert found["missed"] == ["idle beside off"], "which has more rollouts ready, and older ones"
    assert ours["idle"] < 0.1
    assert ours["mean_staleness"] < off["mean_staleness"] - 1


def test_an_engine_in_lockstep_gets_parts_of_a_batch_and_so_takes_newer_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version takes 0.3 steps to arrive and a batch 0.8 to be drawn. Begun in one piece, before the version is there,
    all of it is two steps old."""

    def run() -> Figures:
        figures = simulate_case(row_of("lockstep"), "deadlines", steps=350).figures
        assert figures is not None
        return figures

    ours = run()
    monkeypatch.setattr(rules, "MAX_PARTS", 1)
    whole = run()
    assert statistics.fmean(whole.trained[-30 * 256 :]) == pytest.approx(2.0, abs=0.1)
    assert statistics.fmean(ours.trained[-30 * 256 :]) < 1.6
    assert ours.idle_share <= whole.idle_share + 0.005


SEEDED = [
    *((replace(row_of("single"), max_staleness=2, broadcast=broadcast), 1) for broadcast in (0.1, 1.0)),
    (row_of("single"), 2),
    (row_of("groups"), 1),
    (replace(row_of("serial"), max_staleness=8, broadcast=3.0), 1),
]


@pytest.mark.parametrize(("row", "seed"), SEEDED)
def test_no_rule_that_never_waits_is_below_the_floor(row: Row, seed: int) -> None:
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
