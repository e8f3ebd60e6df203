"""The benchmark of membership measures what it says: on a small swarm, and on one whose detector is broken."""

from __future__ import annotations

import math

import pytest

from benchmarks.gossip import Plan, run, time_of_share

PLAN = Plan(nodes=30, leaf_share=0.7, seeds=1, heads=2, newcomers=1, crashes=1, leaf_crashes=1, node_hours=3.0)

TARGETS = {
    **{"head_known_p99_s": 5.0, "head_known_all_s": 15.0, "record_known_p99_s": 15.0},
    **{"crash_known_p99_s": 60.0, "crash_leaf_known_s": 60.0},
    **{"public_bytes_per_s": 12_000.0, "leaf_bytes_per_s": 500.0},
}


def test_a_small_swarm_meets_the_targets() -> None:
    row = run(PLAN)
    for key, limit in TARGETS.items():
        assert 0 < row[key] <= limit, (key, row[key])
    assert (row["nodes"], row["publics"], row["seeds"], row["loss"]) == (30, 9, 1, 0.1)
    assert row["false_deaths"] == row["false_deaths_elsewhere"] == row["leaves_without_homes"] == 0
    assert row["node_hours"] == pytest.approx(3.1), "31 nodes: whoever crashes does so afterwards"
    assert row["head_known_p99_s"] <= row["head_known_all_s"] <= row["head_known_all_worst_s"]


def test_time_of_a_share() -> None:
    times = [float(second) for second in range(100, 0, -1)]
    assert [time_of_share(times, of, share) for of, share in ((100, 0.99), (100, 1.0))] == [99.0, 100.0]
    assert time_of_share(times, 101, 1.0) == time_of_share([], 0, 1.0) == math.inf
