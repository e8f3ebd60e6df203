"""The benchmark of ingest."""

from __future__ import annotations

import pytest

from benchmarks.ingest import cores, measure
from benchmarks.ingest_nodes import Plan


@pytest.mark.slow
def test_real_processes_are_measured() -> None:
    found = measure(Plan(cores=cores(), nodes=2, groups_per_step=4, warm_s=0.1, measure_s=0.5, repeats=1))
    assert found.keys() >= {"met", "rollouts_per_cpu_s", "core_share", "p50_ms", "p99_ms", "rss_mb"}
    assert min(found["rollouts_per_s"], found["journal_bytes_per_s"], found["outcomes"]["accepted"]) > 0
