"""The benchmark of the audit: a small model is drawn from, replayed and summed up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.audit import LEARNERS, measure, summary

SMALL = Path(__file__).parents[3] / "examples" / "arithmetic"


@pytest.mark.long
def test_an_honest_engine_is_far_within_its_limits_and_a_large_lie_is_caught(tmp_path: Path) -> None:
    measure(["transformers/float32"], str(SMALL), "cpu", 5, tmp_path)
    rows = list(summary(tmp_path))
    assert [row["learner"] for row in rows] == list(LEARNERS)
    for row in rows:
        assert row["tokens"] > 50
        assert row["largest_sum"] < 0.1
        assert row["margin_max"] < 0.3
        assert row["tokens_until_shift"]["1"] is not None
    assert rows[0]["size"] < 1e-4 < rows[1]["size"]
