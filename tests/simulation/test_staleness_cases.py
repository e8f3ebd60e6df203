"""Hard cases of the benchmark of staleness: the aim adapts, and costs next to nothing."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import staleness
from benchmarks.staleness import CaseRule, CaseRun, Row, case_misses, measure_case, recovery, simulate_case
from benchmarks.staleness_sim import Figures
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
    found = measure_case(row_of(case), steps=steps, seeds=1)
    ours, off = found["rules"].values()
    assert found["missed"] == []
    assert ours["mean_staleness"] < off["mean_staleness"] - 1
    assert (found["recovery_batches"] is None) == (case in ("mixed", "places"))


def test_the_learner_waits_no_longer_for_rounds_of_held_out_prompts_than_they_take() -> None:
    """Two of four batches each, which go first: 8 of 60 steps for this fleet, less what was drawn before."""
    found = measure_case(row_of("bursts"), steps=120, seeds=1)
    ours, off = found["rules"].values()
    assert found["missed"] == ["idle beside off"], "which has more rollouts ready, and older ones"
    assert ours["idle"] < 0.1
    assert ours["mean_staleness"] < off["mean_staleness"] - 1


def run_of(case: str, *, steps: int) -> CaseRun:
    row = row_of(case)
    return CaseRun(case, CaseRule(row.setting("deadlines")), row.fleet(ahead=True), steps=steps, seed=1)


def test_half_of_the_fleet_is_lost_as_many_join_and_a_mixed_one_is_as_fast_as_an_even_one() -> None:
    halved, doubled, mixed = run_of("halved", steps=20), run_of("doubled", steps=20), run_of("mixed", steps=2)
    assert (halved.run().lost > 0, doubled.run().lost) == (True, 0)
    assert [sum(worker.alive for worker in run._workers.values()) for run in (halved, doubled)] == [13, 26]
    mixed.run()
    speeds = [worker.speed for worker in mixed._workers.values()]
    assert sum(speeds) == pytest.approx(13)
    assert 30 < max(speeds) / min(speeds) <= 50


def test_an_engine_in_lockstep_gets_parts_of_a_batch_and_so_takes_newer_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version takes 0.3 steps to arrive and a batch 0.8 to be drawn. Begun in one piece, before the version is there,
    all of it is two steps old."""

    def run() -> Figures:
        figures = simulate_case(row_of("lockstep"), "deadlines", steps=350, seed=1).figures
        assert figures is not None
        return figures

    ours = run()
    monkeypatch.setattr(rules, "MAX_PARTS", 1)
    whole = run()
    assert statistics.fmean(whole.trained[-30 * 256 :]) == pytest.approx(2.0, abs=0.1)
    assert statistics.fmean(ours.trained[-30 * 256 :]) < 1.6
    assert ours.idle_share <= whole.idle_share + 0.005


def test_rounds_of_held_out_prompts_are_drawn_and_are_no_training_data() -> None:
    outcome = simulate_case(row_of("bursts"), "deadlines", steps=90, seed=1)
    assert outcome.events == [20, 40]
    assert outcome.figures is not None
    assert outcome.figures.held_out > 128
    assert len(outcome.figures.trained) == 45 * 32


def test_recovery_counts_the_batches_that_were_waited_for_longer() -> None:
    ours, off = [9.0, 9.0, 0.2, 1.0, 1.0, *[0.0] * 6, 5.0, *[0.0] * 8], [0.0] * 20
    assert [recovery(ours, off, 0), recovery(ours, off, 2), recovery(ours, ours, 0)] == [4, 3, 0]


def test_every_miss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    met = {rule: {"idle": 0.0, "discarded": 0.0, "mean_staleness": 1.0} for rule in staleness.PAIR}
    assert case_misses(met, 0, 3) == []
    worse = met | {"deadlines": {"idle": 0.006, "discarded": 0.011, "mean_staleness": 1.0}}
    assert case_misses(worse, 0, 4) == ["recovery", "idle beside off", "discards beside off"]
    monkeypatch.setattr(CaseRule, "ask", lambda *_, **__: None)
    found = measure_case(row_of("mixed"), steps=6, seeds=1)
    assert (found["missed"], found["rules"]) == (["deadlock"], dict.fromkeys(staleness.PAIR))
