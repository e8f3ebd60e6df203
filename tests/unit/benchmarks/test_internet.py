"""What is read of a run as over the internet. No swarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.internet import WARM_UP_STEPS, figures


def write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_first_steps_are_left_out_and_a_tail_is_shown(tmp_path: Path) -> None:
    first = {"idle_share": 1.0, "staleness/mean": 0.0, "broadcast_s": None}
    steps = [{**first, "time": 100.0 + step} for step in range(WARM_UP_STEPS)]
    steps += [
        {"idle_share": idle, "staleness/mean": 2.0, "broadcast_s": spread_s, "time": 200.0 + 4.0 * step}
        for step, (idle, spread_s) in enumerate([(0.0, 3.0), (0.5, 9.0), (None, 4.0)])
    ]
    write(tmp_path / "metrics.jsonl", steps)
    prepared = {"kind": "prepared", "time": 90.0}
    evaluated = [{"kind": "evaluated", "version": version, "exact_match": version / 10} for version in (0, 5)]
    write(tmp_path / "events.jsonl", [prepared, *evaluated])
    (tmp_path / "versions").mkdir()
    for number, nbytes in enumerate((10, 30)):
        (tmp_path / "versions" / f"0.{number}.chunks").write_bytes(bytes(nbytes))
    assert figures(tmp_path, 6) == {
        "held_out": {0: 0.0, 5: 0.5},
        "steps": WARM_UP_STEPS + 3,
        "killed_at": 6,
        "first_step_after_s": 10.0,
        "step_s": 4.0,
        "idle_share": 0.167,
        "staleness": 2.0,
        "version_bytes": 20,
        "version_s": [4.0, 9.0],
    }
