"""Hard cases of the benchmark of staleness: the aim adapts, and costs next to nothing."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import staleness_cases
from benchmarks.staleness import Row, fleet_of, setting_of
from benchmarks.staleness_cases import (
    CaseRule,
    DoubledRun,
    Engine,
    HalvedRun,
    MixedRun,
    PlacesRun,
    measure,
    recovery,
    simulate,
)
from benchmarks.staleness_sim import STEP_S, Figures, Job
from swarm.rollout.plane import rules


def row_of(case: str) -> Row:
    return Row(case=case, max_staleness=4, broadcast=0.3, generate=0.3)


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("halved", 100),
        *(pytest.param(*more, marks=pytest.mark.long) for more in (("doubled", 60), ("mixed", 60), ("places", 24))),
    ],
)
def test_the_aim_makes_data_younger_and_costs_next_to_nothing(case: str, steps: int) -> None:
    """Half of `halved` is long enough for the aim to fall below what half of the fleet needs."""
    row = row_of(case)
    fleet = fleet_of(row, ahead=True, dying=0.0)
    found = measure(case, setting_of(row, "deadlines"), fleet, steps=steps, seeds=1)
    ours, off = found["rules"].values()
    assert found["missed"] == []
    assert ours["mean_staleness"] < off["mean_staleness"] - 1
    assert (found["recovery_batches"] is None) == (case in ("mixed", "places", "lockstep"))


def test_the_learner_waits_no_longer_for_rounds_of_held_out_prompts_than_they_take() -> None:
    """Two of four batches each, which go first: 8 of 60 steps for this fleet, less what was drawn before."""
    row = row_of("bursts")
    found = measure("bursts", setting_of(row, "deadlines"), fleet_of(row, ahead=True, dying=0.0), steps=60, seeds=1)
    ours, off = found["rules"].values()
    assert found["missed"] == ["idle beside off"], "which has more rollouts ready, and older ones"
    assert ours["idle"] < 0.1
    assert ours["mean_staleness"] < off["mean_staleness"] - 1


def run_of(kind: type[staleness_cases.CaseRun], row: Row, *, steps: int) -> staleness_cases.CaseRun:
    fleet = fleet_of(row, ahead=True, dying=0.0)
    return kind(CaseRule(setting_of(row, "deadlines")), fleet, steps=steps, seed=1)


def test_half_of_the_fleet_is_lost_and_as_many_join() -> None:
    assert [row_of(case).workers for case in ("halved", "doubled")] == [26, 13]
    halved = run_of(HalvedRun, row_of("halved"), steps=20)
    doubled = run_of(DoubledRun, row_of("doubled"), steps=20)
    assert halved.run().lost > 0
    assert doubled.run().lost == 0
    assert [sum(worker.alive for worker in run._workers.values()) for run in (halved, doubled)] == [13, 26]


def test_an_engine_in_lockstep_gets_parts_of_a_batch_and_so_takes_newer_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version takes 0.3 steps to arrive and a batch 0.8 to be drawn. Begun in one piece, before the version is there,
    all of it is two steps old."""
    row = row_of("lockstep")
    setting, fleet = setting_of(row, "deadlines"), fleet_of(row, ahead=True, dying=0.0)

    def run() -> Figures:
        figures = simulate("lockstep", setting, fleet, steps=70, seed=1).figures
        assert figures is not None
        return figures

    ours = run()
    monkeypatch.setattr(rules, "MAX_PARTS", 1)
    whole = run()
    assert statistics.fmean(whole.trained[-30 * 256 :]) == pytest.approx(2.0, abs=0.1)
    assert statistics.fmean(ours.trained[-30 * 256 :]) < 1.6
    assert ours.idle_share <= whole.idle_share + 0.005


def test_rounds_of_held_out_prompts_are_drawn_and_are_no_training_data() -> None:
    row = row_of("bursts")
    outcome = simulate("bursts", setting_of(row, "deadlines"), fleet_of(row, ahead=True, dying=0.0), steps=45, seed=1)
    assert outcome.events == [20, 40]
    assert outcome.figures is not None
    assert outcome.figures.held_out > 128
    assert len(outcome.figures.trained) == 45 * 32


def test_a_mixed_fleet_is_as_fast_as_an_even_one() -> None:
    run = run_of(MixedRun, row_of("mixed"), steps=2)
    run.run()
    speeds = [worker.speed for worker in run._workers.values()]
    assert sum(speeds) == pytest.approx(13)
    assert 30 < max(speeds) / min(speeds) <= 50


def test_an_engine_asks_for_what_it_can_hold_and_says_how_many_places_are_free() -> None:
    engine = Engine(0, 10)
    assert (engine.missing, engine.at_once) == (13, 10)
    engine.running = 10
    assert (engine.missing, engine.at_once) == (3, 0)
    engine.queued.append(Job(number=0, index=0))
    assert (engine.missing, engine.at_once) == (2, 0)
    run = run_of(PlacesRun, row_of("places"), steps=2)
    run.run()
    assert isinstance(run, PlacesRun)
    assert [one.places for one in run._engines] == [25] * 4
    assert all(one.running <= one.places and one.missing >= 0 for one in run._engines)


def test_recovery_counts_the_batches_that_were_waited_for_longer() -> None:
    off = [0.0] * 20
    ours = [9.0, 9.0, 0.2, 1.0, 1.0, *[0.0] * 6, 5.0, *[0.0] * 8]
    assert recovery(ours, off, 0) == 4
    assert recovery(ours, off, 2) == 3
    assert recovery(ours, ours, 0) == 0
    assert 0.2 < staleness_cases.LONGER_SHARE * STEP_S < 1.0


def test_every_miss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    met = {rule: {"idle": 0.0, "discarded": 0.0, "mean_staleness": 1.0} for rule in staleness_cases.RULES}
    assert staleness_cases.misses(met, 0, 3) == []
    worse = met | {"deadlines": {"idle": 0.006, "discarded": 0.011, "mean_staleness": 1.0}}
    assert staleness_cases.misses(worse, 0, 4) == ["recovery", "idle beside off", "discards beside off"]
    row = row_of("mixed")
    monkeypatch.setattr(CaseRule, "ask", lambda *_, **__: None)
    fleet = fleet_of(row, ahead=True, dying=0.0)
    found = measure("mixed", setting_of(row, "deadlines"), fleet, steps=3, seeds=1)
    assert found["missed"] == ["deadlock"]
    assert found["rules"] == dict.fromkeys(staleness_cases.RULES)
