"""Figures of a run that goes on: however its files grow between two looks, they say what one look at the end says."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swarm.report import figures
from swarm.report.figures import FigureFiles, read_figures

# A resumed run repeats steps, and a killed one leaves half a line.
METRICS = b"".join(
    b"%b\n" % json.dumps({"step": step, "time": 1000.0 + step, "reward": step / 8}).encode()
    for step in (1, 2, 3, 2, 3, 4)
)
EVENTS = (
    b'{"time": 1001.5, "kind": "sampler_joined", "node": "n1"}\n{"time": 1002, "kind": "checkpoint", "step": 2}\n'
    b'not json\n{"time": 1003, "kind": "evaluated", "version": 3, "exact_match": 0.5}\n'
    b'{"time": 1004, "kind": "set", "key": "max_staleness", "before": 2, "after": 5, "step": 3}\n{"torn'
)


def said(found: figures.Figures) -> dict[str, Any]:
    columns = {name: list(column.values) for name, column in found.columns.items()}
    return {
        "steps": found.steps,
        "columns": columns,
        "evaluated": {name: list(column.values) for name, column in found.evaluated.items()},
        "times": (list(found.times.steps), list(found.times.values)),
        "kept": (found.bounds, found.events, found.marked, found.kinds),
        "when": (found.began, found.ended),
    }


@given(cuts=st.lists(st.integers(0, max(len(METRICS), len(EVENTS))), max_size=6).map(sorted))
def test_files_that_grow_say_what_they_say_at_the_end(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as place:
        run_dir, steps, events = Path(place), [], []
        (run_dir / "config.json").write_text('{"max_staleness": 2}')
        files = FigureFiles(run_dir)
        for cut in [*cuts, len(METRICS) + len(EVENTS)]:
            (run_dir / "metrics.jsonl").write_bytes(METRICS[:cut])
            (run_dir / "events.jsonl").write_bytes(EVENTS[:cut])
            found = files.look()
            steps += [line["step"] for line in found[0]]
            events += [event["kind"] for event in found[1]]
        whole = read_figures(run_dir)
    assert steps == [1, 2, 3, 4]
    assert events == ["sampler_joined", "checkpoint", "evaluated", "set"]
    for one in (whole, files.figures):
        assert one.bounds == [(0, 2), (3, 5)]
        assert {text for _, text in one.marks(figures.PASSING)} == {"sampler_joined n1", "checkpoint"}
        assert one.marks() == [(3.0, "set max_staleness=5")]
    assert (files.figures.torn, whole.torn) == (1, 2), "what is torn may yet be completed"
    if not cuts:
        assert said(files.figures) == said(whole)
        assert whole.marks(figures.PASSING) == [(1.0, "sampler_joined n1"), (2.0, "checkpoint")]


def test_many_alarms_leave_the_mark_of_what_was_set(tmp_path: Path) -> None:
    alarms = "".join(f'{{"kind": "alarm", "alarm": "gradient", "step": {step}}}\n' for step in range(1, 400))
    setting = '{"kind": "set", "key": "paused", "after": true, "step": 300}\n'
    (tmp_path / "events.jsonl").write_text(alarms + setting)
    found = read_figures(tmp_path).marks()
    assert (300, "set paused=True") in found
    assert len(found) == figures.MARKS_KEPT + 1
    assert found[-1] == (399, "alarm gradient"), "the newest are kept"
