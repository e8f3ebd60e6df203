"""The benchmark of staleness: hard cases, in which the aim adapts and costs next to nothing."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.staleness import Row, measure_case, simulate_case
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
