"""The benchmark of the journal records a run as a learner would."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.journal import BATCH_GROUPS, measure_size, measure_speed
from swarm.rollout.journal.index import DIGEST_BYTES
from swarm.rollout.journal.verify import verify_run

MAX_BYTES = 100
"""What the index may take of the disk for a rollout; over a million rollouts it is less than over few."""


def test_what_the_benchmark_records_is_a_run_without_a_breach(tmp_path: Path) -> None:
    size = asyncio.run(measure_size(tmp_path / "size", 100, 4))
    assert size["rows"] == 2 * 4 * BATCH_GROUPS
    speed = measure_speed(tmp_path / "speed", rollouts=200, tokens=8, size=4)
    assert asyncio.run(speed)["rollouts"] == 4 * 4 * BATCH_GROUPS
    for name, batches in (("size", 2), ("speed", 4)):
        report = verify_run(tmp_path / name, groups_per_step=BATCH_GROUPS, group_size=4)
        assert report.breaches == []
        assert report.trained == batches * 4 * BATCH_GROUPS


@pytest.mark.parametrize("size", [4, 8])
def test_a_rollout_takes_a_hundred_bytes_of_the_index_at_most(tmp_path: Path, size: int) -> None:
    found = asyncio.run(measure_size(tmp_path / "size", 4096, size))
    assert found["rows"] >= 4000
    assert DIGEST_BYTES < found["db_bytes_per_rollout"] <= MAX_BYTES
