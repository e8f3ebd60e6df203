"""How the ingest benchmark makes figures of what it observed, and verdicts of those."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import ingest
from benchmarks.ingest import core_share, latencies_between, medians, percentile, targets
from benchmarks.ingest_clients import Observed
from benchmarks.ingest_learner import Mark


def mark(at_s: float, cpu_s: float = 0.0) -> Mark:
    return Mark(at_s=at_s, cpu_s=cpu_s, rss_mb=1.0, peak_rss_mb=1.0, journal_bytes=0, steps=0, verdicts={})


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


def test_the_core_is_the_learners_for_its_share_of_the_time() -> None:
    assert core_share(mark(1.0, 10.0), mark(3.0, 11.0)) == 0.5


def test_repeats_become_medians_and_counts_become_sums() -> None:
    runs = [{"p99_ms": p99, "outcomes": {"accepted": 8}} for p99 in (3.0, 1.0, 2.0)]
    assert medians(runs) == {"p99_ms": 2.0, "outcomes": {"accepted": 24}}


@pytest.mark.parametrize(
    ("figures", "met"),
    [
        ({"rollouts_per_s": 1500.0, "honest_p99_ratio": 2.0}, [True, True]),
        ({"rollouts_per_s": 1499.9, "honest_p99_ratio": 2.01}, [False, False]),
        ({"rollouts_per_s": float("nan"), "honest_p99_ratio": float("nan")}, [False, False]),
        ({"rollouts_per_s": 1500.0}, [True]),
        ({"honest_p99_ratio": 2.1}, [False]),
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


def test_real_processes_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--warm-up", "0.1", "--seconds", "0.5", "--repeats", "1")
    small = ("--nodes", "2", "--half-nodes", "1", "--half-rate", "80", "--groups-per-step", "4")
    status = ingest.main([*short, *small, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["met"] == (status == 0)
    assert found.keys() >= {"rollouts_per_s", "p50_ms", "p99_ms", "rss_mb", "honest_p99_ms_under_overload"}
    assert min(found["rollouts_per_s"], found["journal_bytes_per_s"]) > 0
    assert found["outcomes"]["accepted"] > 0
    assert found["honest_outcomes"]["accepted"] > 0
