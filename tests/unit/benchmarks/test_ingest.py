"""How the ingest benchmark makes figures of what it observed, and verdicts of those."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import ingest
from benchmarks.ingest import (
    Turn,
    Window,
    latencies_between,
    medians,
    percentile,
    ratio_figures,
    targets,
    window_figures,
)
from benchmarks.ingest_clients import Observed
from benchmarks.ingest_learner import Mark


def mark(at_s: float, cpu_s: float = 0.0, late_s: tuple[float, ...] = ()) -> Mark:
    return Mark(
        at_s=at_s,
        cpu_s=cpu_s,
        rss_mb=1.0,
        peak_rss_mb=1.0,
        journal_bytes=0,
        steps=0,
        verdicts={},
        late_s=late_s,
        written_s=late_s,
    )


def ratio(value: float) -> dict[str, float]:
    return {"honest_p99_ratio": value, "honest_p99_ratio_low": value, "honest_p99_ratio_high": value}


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.5, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([float(i) for i in range(1, 101)], 0.99, 99.0),
    ],
)
def test_a_percentile_is_a_value_that_was_observed(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_only_submissions_that_began_in_the_window_count() -> None:
    observed = Observed(submissions=[(0.9, 9.0), (1.0, 0.003), (1.5, 0.001), (2.0, 9.0)])
    assert latencies_between(observed, mark(1.0), mark(2.0)) == [1.0, 3.0]


def test_windows_of_one_kind_are_taken_together() -> None:
    windows = [
        Window(before=mark(1.0, 10.0), after=mark(3.0, 11.0, (0.001,)), learner_waited_s=0.1, honest_waited_s=0.2),
        Window(before=mark(9.0, 20.0), after=mark(11.0, 22.0, (0.003,)), learner_waited_s=0.3, honest_waited_s=0.0),
    ]
    found = window_figures("unloaded", windows)
    assert found == {
        "core_share_unloaded": pytest.approx(0.75),
        "core_wait_share_unloaded": pytest.approx(0.1),
        "honest_wait_share_unloaded": pytest.approx(0.05),
        "journal_p50_ms_unloaded": 1.0,
        "journal_p99_ms_unloaded": 3.0,
        "loop_late_p50_ms_unloaded": 1.0,
        "loop_late_p99_ms_unloaded": 3.0,
    }


def test_one_stall_decides_a_turn_and_not_the_ratio() -> None:
    calm = [float(n % 10) for n in range(1, 101)]
    turns = [Turn(unloaded_ms=sorted(calm), flooded_ms=sorted(calm)) for _ in range(9)]
    turns.append(Turn(unloaded_ms=sorted(calm), flooded_ms=sorted([*calm[:-2], 90.0, 90.0])))
    found = ratio_figures(turns)
    assert found["honest_submissions_unloaded"] == 1000
    assert found["honest_p99_ratio_of_a_turn_most"] == 10.0
    assert found["honest_p99_ratio"] == found["honest_p99_ratio_low"] == found["honest_p99_ratio_high"] == 1.0
    assert found["honest_longest_ms_under_overload"] == 90.0


def test_turns_that_differ_give_a_wide_range() -> None:
    turns = [Turn(unloaded_ms=[1.0], flooded_ms=[times]) for times in (1.0, 1.0, 3.0, 3.0)]
    found = ratio_figures(turns)
    assert (found["honest_p99_ratio_low"], found["honest_p99_ratio_high"]) == (1.0, 3.0)


def test_repeats_become_medians_and_counts_become_sums() -> None:
    runs = [{"p99_ms": p99, "outcomes": {"accepted": 8}} for p99 in (3.0, 1.0, 2.0)]
    assert medians(runs) == {"p99_ms": 2.0, "outcomes": {"accepted": 24}}


@pytest.mark.parametrize(
    ("figures", "met"),
    [
        ({"rollouts_per_s": 1500.0, **ratio(2.0)}, [True, True]),
        ({"rollouts_per_s": 1499.9, **ratio(2.01)}, [False, False]),
        ({"rollouts_per_s": float("nan"), **ratio(float("nan"))}, [False, False]),
        ({"rollouts_per_s": 1500.0}, [True]),
        (ratio(2.1), [False]),
    ],
)
def test_what_was_measured_is_held_against_its_targets(figures: dict[str, float], met: list[bool]) -> None:
    assert list(targets(figures).values()) == met


@pytest.mark.parametrize(("rate", "status", "word"), [(1500.0, 0, "met"), (1499.0, 1, "missed")])
def test_a_missed_target_is_said_and_exit_status_1(
    rate: float, status: int, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ingest, "measure", lambda plan, parts: {"rollouts_per_s": rate})
    assert ingest.main(["--only", "speed", "--json"]) == status
    line, found = capsys.readouterr().out.splitlines()
    assert line.startswith(f"target {word}: ")
    assert json.loads(found) == {"met": status == 0, "rollouts_per_s": rate}


@pytest.mark.slow
def test_real_processes_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--warm-up", "0.1", "--seconds", "0.5", "--repeats", "1")
    turns = ("--turns", "2", "--turn-seconds", "0.5", "--settle", "0.1")
    small = ("--nodes", "2", "--half-nodes", "1", "--half-rate", "80", "--groups-per-step", "4")
    status = ingest.main([*short, *turns, *small, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["met"] == (status == 0)
    assert found.keys() >= {"rollouts_per_s", "p50_ms", "p99_ms", "rss_mb", "honest_p99_ms_under_overload"}
    assert min(found["rollouts_per_s"], found["journal_bytes_per_s"]) > 0
    assert found["outcomes"]["accepted"] > 0
    assert found["honest_outcomes"]["accepted"] > 0
