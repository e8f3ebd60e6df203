"""The benchmark of ingest."""

from __future__ import annotations

import pytest

from benchmarks.ingest import cores, measure, percentile
from benchmarks.ingest_nodes import Plan


def test_a_percentile_is_a_value_that_was_observed() -> None:
    assert (percentile([1.0, 2.0], 0.5), percentile([1.0, 2.0, 3.0], 0.5)) == (1.0, 2.0)
    assert percentile([float(i) for i in range(1, 101)], 0.99) == 99.0


@pytest.mark.slow
def test_real_processes_are_measured() -> None:
    found = measure(Plan(cores=cores(), nodes=2, groups_per_step=4, warm_s=0.1, measure_s=0.5, repeats=1))
    assert found.keys() >= {"met", "rollouts_per_cpu_s", "core_share", "p50_ms", "p99_ms", "rss_mb"}
    assert min(found["rollouts_per_s"], found["journal_bytes_per_s"], found["outcomes"]["accepted"]) > 0
