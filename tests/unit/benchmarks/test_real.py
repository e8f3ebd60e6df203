"""The figures of benchmarks.real, and that a run in its file is not run again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import real

LINE = {"step_s": [9.0, 5.0, 7.0], "step_cpu_s": [20.0, 8.0, 10.0], "peak_bytes": 2_000_000_000, "seed": 0}
HELD_OUT = [(0, 0.0, 0.1), (10, 60.0, 0.45), (20, 120.0, 0.4)]


def test_a_summary_leaves_the_warm_up_out_and_says_when_a_share_was_reached() -> None:
    found = real.summary([{**LINE, "held_out": HELD_OUT, "settings": {}}], warm_up=1)
    assert (found["step_s"], found["cpu_s_per_step"], found["peak_gb"]) == (6.0, 9.0, 2.0)
    assert found["seconds_to"] == {"0.3": 60.0, "0.4": 60.0, "0.5": None, "0.6": None, "0.7": None}
    assert real.step_s({"step_s": [9.0, 5.0]}, 3) == 5.0


def test_cpu_time_is_read_between_two_readings() -> None:
    watched = real.Watched(cpu_s=[(10.0, 1.0), (20.0, 3.0), (30.0, 9.0)])
    assert [watched.cpu_at(time_s) for time_s in (10.0, 15.0, 25.0, 40.0)] == [1.0, 2.0, 6.0, 9.0]


def test_a_run_that_is_in_the_file_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, runs = argparse.Namespace(to=tmp_path / "real.jsonl", model=Path("m")), list[int]()

    def run(model: Path, seed: int, settings: dict[str, Any], steps: int) -> dict[str, Any]:
        runs.append(seed)
        return {"step_s": [1.0]}

    monkeypatch.setitem(real.SYSTEMS, "echo-node", run)
    lines = [real.done(options, "echo-node", seed, {"a": 1}, 2) for seed in (0, 1, 0)]
    assert runs == [0, 1]
    assert lines[2]["step_s"] == lines[0]["step_s"]
    real.done(options, "echo-node", 0, {"a": 2}, 2)
    assert runs == [0, 1, 0]
    assert len(options.to.read_text().splitlines()) == 3


def test_the_fastest_settings_of_trl_are_taken(tmp_path: Path) -> None:
    def line(batch: int, seconds: float, **settings: Any) -> dict[str, Any]:
        given = {"threads": 2, "dtype": "bf16", "batch": batch, "eval_prompts": 0, "minibatches": 2, **settings}
        return {"system": "trl", "settings": given, "step_s": [99.0, seconds]}

    lines = json.loads(json.dumps([line(48, 9.0), line(24, 8.0), line(96, 1.0, minibatches=1)]))
    assert real.best_of_trl(lines, {"minibatches": 2}) == {"threads": 2, "dtype": "bf16", "batch": 24}
    assert real.best_of_trl([], {"minibatches": 2})["batch"] == 48


def test_trl_is_asked_for_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.real.find_spec", lambda name: None)
    options = argparse.Namespace(to=tmp_path / "real.jsonl", model=Path("m"))
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[bench\]'"):
        real.done(options, "trl", 0, {}, 2)
