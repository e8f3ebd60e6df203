"""Profiles, faults, the four-term bound and the figures of the broadcast benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.links import (
    BYTES_PER_MBIT,
    Fault,
    HostLink,
    Profile,
    Sample,
    Transfer,
    bound_s,
    bound_with_faults_s,
    cpu_s_at,
    equal_profile,
    figures_of,
    profile_of,
    read_profile,
    sent_between,
)

PROFILES = Path(__file__).parents[3] / "benchmarks" / "profiles"
MIB_64 = 64 << 20


def profile(learner_up: float, *peers: tuple[float, float, bool]) -> Profile:
    links = [HostLink(up_mbit=up, down_mbit=down, reachable=reachable) for up, down, reachable in peers]
    return profile_of("test", [HostLink(up_mbit=learner_up, down_mbit=100.0), *links])


@pytest.mark.parametrize(
    ("links", "seconds_per_mbit"),
    [
        (profile(10, (50, 100, True), (50, 100, True)), 1 / 10),  # the learner's uplink
        (profile(100, (50, 20, True), (50, 100, True)), 1 / 20),  # the slowest downlink
        (profile(50, *[(50, 100, True)] * 8), 8 / 450),  # all uplinks; under 1 / 50, which binds
        (profile(100, *[(10, 200, True)] * 8), 8 / 180),  # all uplinks
        (profile(50, *[(10, 500, True)] * 2, *[(200, 500, False)] * 6), 6 / 70),  # the leaves' cut
        (profile(50, *[(200, 500, False)] * 3), 3 / 50),  # no public peer: a star
    ],
)
def test_the_bound_is_the_largest_of_four_terms(links: Profile, seconds_per_mbit: float) -> None:
    binding = max(seconds_per_mbit, 1 / links.learner.up_mbit)
    assert bound_s(BYTES_PER_MBIT, links) == pytest.approx(binding)


def test_every_profile_here_can_be_read() -> None:
    bounds = {path.stem: bound_s(MIB_64, read_profile(path)) for path in PROFILES.glob("*.toml")}
    assert min(bounds.values()) > 0
    assert bounds["homogeneous"] == pytest.approx(10.737, abs=0.001), "64 MiB in decimal Mbit: 536.87"
    assert bounds["heterogeneous"] == pytest.approx(6.711, abs=0.001)


HET = read_profile(PROFILES / "heterogeneous.toml")


def test_the_bound_with_faults_takes_each_stretch_by_itself() -> None:
    kill = Fault(kind="kill", host=9, fraction=0.5)
    # 8 peers share 640 Mbit/s for one half, 7 peers 440 for the other.
    assert bound_with_faults_s(BYTES_PER_MBIT, HET, [kill]) == pytest.approx(0.5 * 8 / 640 + 0.5 * 7 / 440)
    late = Fault(kind="stall-up", host=8, fraction=0.75)
    expected = 0.5 * 8 / 640 + 0.25 * 7 / 440 + 0.25 * 7 / 341
    assert bound_with_faults_s(BYTES_PER_MBIT, HET, [late, kill]) == pytest.approx(expected)
    assert bound_with_faults_s(BYTES_PER_MBIT, HET, []) == bound_s(BYTES_PER_MBIT, HET)


# -- figures ---------------------------------------------------------------------------------------------------

PEERS = equal_profile(2, 8, 80)
"""1 MB takes one second of the learner's uplink."""

SAMPLES = [
    Sample(at_s=100.0, cpu_s=5.0, sent_bytes=0),
    Sample(at_s=102.0, cpu_s=6.0, sent_bytes=2_000_000),
    Sample(at_s=104.0, cpu_s=10.0, sent_bytes=2_400_000),
]


def test_the_figures_of_one_run() -> None:
    ends_s = {2: 102.25, 3: 103.0}
    run = Transfer(nbytes=1_000_000, began_s=101.0, completed_s=ends_s, samples=SAMPLES, encrypted=True)
    assert figures_of(run, PEERS, []) == {
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


def test_totals_of_cpu_lie_on_a_line_and_bytes_sent_do_not() -> None:
    assert [cpu_s_at(SAMPLES, at) for at in (99.0, 101.0, 103.0, 200.0)] == [5.0, 5.5, 8.0, 10.0]
    stretches = ((100.0, 102.0), (101.9, 102.1), (102.0, 104.0), (99.0, 200.0))
    assert [sent_between(SAMPLES, *one) for one in stretches] == [2_000_000, 2_400_000, 400_000, 2_400_000]
