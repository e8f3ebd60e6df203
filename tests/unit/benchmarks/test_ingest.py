"""How the ingest benchmark makes figures of what it observed."""

from __future__ import annotations

import pytest

from benchmarks.ingest import Plan, Turn, latencies_between, measure, percentile, ratio_figures
from benchmarks.ingest_clients import Observed
from benchmarks.ingest_learner import Mark


def mark(at_s: float) -> Mark:
    return Mark(at_s=at_s, cpu_s=0.0, rss_mb=1.0, peak_rss_mb=1.0, journal_bytes=0, steps=0, verdicts={})


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.5, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([float(i) for i in range(1, 101)], 0.99, 99.0),
    ],
)
def test_a_percentile_is_a_value_that_was_observed(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_only_submissions_that_began_in_the_window_count() -> None:
    observed = Observed(submissions=[(0.9, 9.0), (1.0, 0.003), (1.5, 0.001), (2.0, 9.0)])
    assert latencies_between(observed, mark(1.0), mark(2.0)) == [1.0, 3.0]


def test_one_stall_decides_a_turn_and_not_the_ratio() -> None:
    calm = [float(n % 10) for n in range(1, 101)]
    turns = [Turn(unloaded_ms=sorted(calm), flooded_ms=sorted(calm)) for _ in range(9)]
    turns.append(Turn(unloaded_ms=sorted(calm), flooded_ms=sorted([*calm[:-2], 90.0, 90.0])))
    found = ratio_figures(turns)
    assert found["honest_submissions_unloaded"] == 1000
    assert found["honest_p99_ratio_of_a_turn_most"] == 10.0
    assert found["honest_p99_ratio"] == found["honest_p99_ratio_low"] == found["honest_p99_ratio_high"] == 1.0
    assert found["honest_longest_ms_under_overload"] == 90.0


def test_turns_that_differ_give_a_wide_range() -> None:
    turns = [Turn(unloaded_ms=[1.0], flooded_ms=[times]) for times in (1.0, 1.0, 3.0, 3.0)]
    found = ratio_figures(turns)
    assert (found["honest_p99_ratio_low"], found["honest_p99_ratio_high"]) == (1.0, 3.0)


@pytest.mark.slow
def test_real_processes_are_measured() -> None:
    plan = Plan(
        nodes=2,
        half_nodes=1,
        half_rollouts_per_s=80.0,
        groups_per_step=4,
        warm_s=0.1,
        measure_s=0.5,
        repeats=1,
        turns=2,
        turn_s=0.5,
        settle_s=0.1,
    )
    found = measure(plan, ["speed", "overload"])
    assert found.keys() >= {"met", "p50_ms", "p99_ms", "rss_mb", "honest_p99_ms_under_overload", "flood_core_share"}
    assert min(found["rollouts_per_s"], found["journal_bytes_per_s"]) > 0
    assert found["outcomes"]["accepted"] > 0
    assert found["honest_outcomes"]["accepted"] > 0
