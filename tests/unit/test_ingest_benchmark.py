"""How the ingest benchmark makes figures of what it observed."""

from __future__ import annotations

import pytest

from benchmarks.ingest import core_share, latencies_between, medians, percentile
from benchmarks.ingest_clients import Observed
from benchmarks.ingest_learner import Mark


def mark(at_s: float, cpu_s: float = 0.0) -> Mark:
    return Mark(at_s=at_s, cpu_s=cpu_s, rss_mb=1.0, peak_rss_mb=1.0, journal_bytes=0, steps=0, verdicts={})


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


def test_the_core_is_the_learners_for_its_share_of_the_time() -> None:
    assert core_share(mark(1.0, 10.0), mark(3.0, 11.0)) == 0.5


def test_repeats_become_medians_and_counts_become_sums() -> None:
    runs = [{"p99_ms": p99, "outcomes": {"accepted": 8}} for p99 in (3.0, 1.0, 2.0)]
    assert medians(runs) == {"p99_ms": 2.0, "outcomes": {"accepted": 24}}
