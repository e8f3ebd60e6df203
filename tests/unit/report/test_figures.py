"""Figures of a run that goes on: however its files grow between two looks, they say what one look at the end says."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.dashboard.source import older_events
from swarm.report import figures
from swarm.report.figures import FigureFiles, read_figures
from swarm.run.directory import create_run_directory, ran_on
from swarm.run.log import RunLog
from swarm.settings import LeadConfig
from tests.unit.runs import json_lines

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


def run_in(directory: Path, **settings: Any) -> Path:
    create_run_directory(directory, LeadConfig(run_dir=directory, **settings))
    return directory


def log_steps(run_dir: Path, steps: int, **of: Any) -> None:
    with closing(RunLog(run_dir)) as log:
        for step in range(1, steps + 1):
            log.metrics({"step": step, "time": 1000.0 + step, **{name: value(step) for name, value in of.items()}})


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path)) as log:
        for step, value in enumerate([0.5, float("nan"), float("inf"), None, True, "x", 10**400, 0.75]):
            log.metrics({"step": step + 1, "loss": value})
    assert list(read_figures(tmp_path).columns["loss"].values) == [0.5, 0.75]


def test_held_out_figures_are_told_by_version_and_too_many_names_are_not_read(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, **{f"x{number}": float for number in range(figures.MAX_NAMES + 10)}, eval_reward=float)
    with closing(RunLog(tmp_path)) as log:
        log.event("evaluated", version=10, exact_match=0.25, **{"pass@4": 0.5}, prompts=8)
        log.event("evaluated", version=40, exact_match=0.125, **{"pass@4": 0.75}, prompts=8)
    found = read_figures(tmp_path)
    assert len(found.columns) == figures.MAX_NAMES
    assert {name: list(one.values) for name, one in found.evaluated.items()} == {
        "exact_match": [0.25, 0.125],
        "pass@4": [0.5, 0.75],
    }


def test_the_bound_of_a_former_life_is_not_that_of_the_configuration(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run", max_staleness=1)
    with closing(RunLog(run_dir)) as log:
        log.event("set", key="max_staleness", before=4, after=1, step=5, by="resume")
    found = read_figures(run_dir)
    assert (found.bounds, found.bound) == ([(0, 4), (5, 1)], 4)


def test_events_of_a_long_run_are_counted_and_the_middle_is_left_out(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path)) as log:
        for number in range(5000):
            log.event("sampler_joined", node=f"n{number:04}")
            if number == 2500:
                log.event("alarm", alarm="entropy", step=7, text="collapsed")
    found = read_figures(tmp_path)
    joined = [event["node"] for event in found.events if event["kind"] == "sampler_joined"]
    assert (found.kinds["sampler_joined"], len(joined)) == (5000, 2 * figures.EVENTS_KEPT)
    assert (joined[0], joined[-1]) == ("n0000", "n4999")
    assert [event["text"] for event in found.events if event["kind"] == "alarm"] == ["collapsed"]


def test_a_start_tells_what_it_ran_on_but_shows_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/echo-node", "lead", "--provider", "key=a-secret-of-mine"])
    monkeypatch.setenv("SOME_TOKEN", "another secret")
    with closing(RunLog(tmp_path)) as log:
        log.event("prepared", step=0, device="cpu", **ran_on())
        log.event("prepared", step=7, device="cuda", **ran_on())
    (first, _) = json_lines(tmp_path / "events.jsonl")
    assert first["command"] == ["echo-node", "lead", "--provider", "key=a-secret-of-mine"]
    assert first["libraries"]["torch"].startswith("2.")
    assert "another secret" not in (tmp_path / "events.jsonl").read_text()
    found = read_figures(tmp_path)
    assert (found.ran_on["step"], found.ran_on["device"]) == (7, "cuda")
    assert "a-secret-of-mine" not in json.dumps([found.events, older_events(tmp_path, 1 << 53, 9)])
