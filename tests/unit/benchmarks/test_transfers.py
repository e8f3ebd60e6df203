"""The figures of the broadcast benchmark, from what was observed."""

from __future__ import annotations

import pytest

from benchmarks.links import Fault, equal_profile
from benchmarks.transfers import Sample, Transfer, TransferFailed, cpu_s_at, figures_of, medians, sent_between, table

PEERS = equal_profile(2, 8, 80)
"""1 MB takes one second of the learner's uplink."""

SAMPLES = [
    Sample(at_s=100.0, cpu_s=5.0, sent_bytes=0),
    Sample(at_s=102.0, cpu_s=6.0, sent_bytes=2_000_000),
    Sample(at_s=104.0, cpu_s=10.0, sent_bytes=2_400_000),
]


def transfer(**changes: object) -> Transfer:
    observed = {
        "nbytes": 1_000_000,
        "began_s": 101.0,
        "completed_s": {2: 102.25, 3: 103.0},
        "samples": SAMPLES,
        "encrypted": True,
    }
    return Transfer(**{**observed, **changes})  # type: ignore[arg-type]


def test_the_figures_of_one_run() -> None:
    assert figures_of(transfer(), PEERS, []) == {
        "last_peer_s": 2.0,
        "bound_s": 1.0,
        "ratio": 2.0,
        "first_peer_s": 1.25,
        "cpu_s_per_gb": (8.0 - 5.5) / 0.002,
        "learner_sent_bytes": 2_400_000,
        "learner_copies": 2.4,
        "version_bytes": 1_000_000,
        "encrypted": True,
    }


def test_a_peer_that_was_killed_is_not_waited_for() -> None:
    fault = Fault(kind="kill", host=3, fraction=0.5)
    found = figures_of(
        transfer(completed_s={2: 102.25}, faults_s=[101.5], victims_sent_bytes=[250_000]), PEERS, [fault]
    )
    assert found["last_peer_s"] == found["first_peer_s"] == 1.25
    assert found["cpu_s_per_gb"] == pytest.approx((6.5 - 5.5) / 0.001)
    assert found["bound_without_faults_s"] == 1.0
    assert found["faults_s"] == [0.5]
    assert found["victims_sent_copies"] == [0.25]


def test_a_transfer_names_its_plan_if_it_has_one() -> None:
    assert "topology" not in figures_of(transfer(), PEERS, [])
    assert figures_of(transfer(topology="forest"), PEERS, [])["topology"] == "forest"


@pytest.mark.parametrize(
    ("moment_s", "cpu_s"), [(99.0, 5.0), (100.0, 5.0), (101.0, 5.5), (102.0, 6.0), (103.0, 8.0), (200.0, 10.0)]
)
def test_totals_between_samples_lie_on_a_line(moment_s: float, cpu_s: float) -> None:
    assert cpu_s_at(SAMPLES, moment_s) == cpu_s


@pytest.mark.parametrize(
    ("began_s", "ended_s", "sent_bytes"),
    [(100.0, 102.0, 2_000_000), (101.9, 102.1, 2_400_000), (102.0, 104.0, 400_000), (99.0, 200.0, 2_400_000)],
)
def test_nothing_that_was_sent_is_taken_for_older_than_the_transfer(
    began_s: float, ended_s: float, sent_bytes: float
) -> None:
    assert sent_between(SAMPLES, began_s, ended_s) == sent_bytes


def test_repeats_give_medians_and_all_ratios() -> None:
    runs = [
        {"ratio": ratio, "encrypted": True, "learner_sent_bytes": sent}
        for ratio, sent in ((1.3, 7), (1.1, 9), (1.2, 5))
    ]
    assert medians(runs) == {"ratio": 1.2, "encrypted": True, "learner_sent_bytes": 7, "ratios": [1.3, 1.1, 1.2]}
    assert medians(runs[:1]) == runs[0]


def test_the_table_has_a_line_for_each_scheme_and_for_failures() -> None:
    found = figures_of(transfer(), PEERS, [])
    lines = table({"relay": found, "star": {"error": "not done after 9 s"}, "chain": medians([found, found])})
    assert [line.split()[0] for line in lines] == ["scheme", "relay", "star", "chain", "ratios:"]
    assert "2.000" in lines[1]
    assert "not done after 9 s" in lines[2]


def test_a_fault_that_came_after_the_end_is_no_measurement() -> None:
    fault = Fault(kind="stall-up", host=3, fraction=0.5)
    with pytest.raises(TransferFailed, match="before the fault"):
        figures_of(transfer(faults_s=[103.0]), PEERS, [fault])
