"""The benchmark of long episodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.episodes import EPISODES, learner


def test_what_a_turn_costs_is_measured(tmp_path: Path) -> None:
    found = asyncio.run(learner(2, tmp_path))
    assert found["turns"] == 2 * EPISODES
    assert 2 < found["bytes_over_tokens"] < 20
    assert found["loop_ms_per_turn"] > 0
