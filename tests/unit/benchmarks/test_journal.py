"""The benchmark of the journal records a run as a learner would."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.journal import BATCH_GROUPS, measure_size, measure_speed
from swarm.rollout.journal.index import DIGEST_BYTES
from swarm.rollout.journal.verify import verify_run

MAX_BYTES = 100  # What the index may take of the disk for a rollout; over a million rollouts it is less than over few


def test_what_the_benchmark_records_is_a_run_without_a_breach_and_small(tmp_path: Path) -> None:
    size = asyncio.run(measure_size(tmp_path / "size", 4096, 4))
    assert DIGEST_BYTES < size["db_bytes_per_rollout"] <= MAX_BYTES
    speed = asyncio.run(measure_speed(tmp_path / "speed", rollouts=200, tokens=8, size=4))
    assert speed.keys() >= {"rollouts_per_s", "cpu_us_per_rollout", "p50_ms", "p99_ms", "sync_ms"}
    for name, found in (("size", size["rows"]), ("speed", speed["rollouts"])):
        report = verify_run(tmp_path / name, groups_per_step=BATCH_GROUPS, group_size=4)
        assert (report.breaches, report.trained) == ([], found)
