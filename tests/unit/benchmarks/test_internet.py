"""What is read of a run as over the internet, and the line that stands for it. No swarm."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.internet import WARM_UP_STEPS, figures
from benchmarks.links import PACKET_BYTES, SendingWindow


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
    evaluated = [{"kind": "evaluated", "version": version, "exact_match": version / 10} for version in (0, 5)]
    write(tmp_path / "events.jsonl", [{"kind": "prepared", "time": 90.0}, *evaluated])
    (tmp_path / "versions").mkdir()
    for number, nbytes in enumerate((10, 30)):
        (tmp_path / "versions" / f"0.{number}.chunks").write_bytes(bytes(nbytes))
    times = {"first_step_after_s": 10.0, "step_s": 4.0, "version_s": [4.0, 9.0]}
    shares = {"idle_share": 0.167, "staleness": 2.0, "version_bytes": 20, "held_out": {0: 0.0, 5: 0.5}}
    assert figures(tmp_path, 6) == {"steps": WARM_UP_STEPS + 3, "killed_at": 6, **times, **shares}


def test_a_lossy_line_is_as_fast_as_tcp_is_over_it() -> None:
    """Mathis et al. (1997): about 1.2 packets a round trip by the root of the loss, here with a gentler backing off."""
    window, nbytes = SendingWindow(0.08, 0.005, Random(1)), 20_000_000
    sending_s, lost_s = window.send(nbytes)
    assert 1.2 < nbytes / PACKET_BYTES / sending_s * 0.08 * math.sqrt(0.005) < 2.2
    assert lost_s == 0.08
