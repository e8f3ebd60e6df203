"""Profiles, faults, the four-term bound and the figures of the broadcast benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.links import (
    BYTES_PER_MBIT,
    BadProfile,
    Fault,
    HostLink,
    Profile,
    Sample,
    Transfer,
    TransferFailed,
    after,
    bound_s,
    bound_with_faults_s,
    check_faults,
    cpu_s_at,
    equal_profile,
    fastest,
    figures_of,
    medians,
    profile_of,
    read_fault,
    read_profile,
    sent_between,
    survivors,
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


@given(
    st.floats(1, 1000),
    st.lists(st.tuples(st.floats(1, 1000), st.floats(1, 1000), st.booleans()), min_size=2, max_size=20),
)
def test_nobody_is_served_faster_for_having_worse_links(
    learner_up: float, peers: list[tuple[float, float, bool]]
) -> None:
    links = profile(learner_up, *peers)
    least = bound_s(MIB_64, links)
    for number, link in links.peers.items():
        for worse in (
            msgspec.structs.replace(link, up_mbit=link.up_mbit / 2),
            msgspec.structs.replace(link, down_mbit=link.down_mbit / 2),
            msgspec.structs.replace(link, reachable=False),
        ):
            assert bound_s(MIB_64, replace(links, peers={**links.peers, number: worse})) >= least


def test_every_profile_here_can_be_read() -> None:
    bounds = {path.stem: bound_s(MIB_64, read_profile(path)) for path in PROFILES.glob("*.toml")}
    assert min(bounds.values()) > 0
    assert bounds["homogeneous"] == pytest.approx(10.737, abs=0.001), "64 MiB in decimal Mbit: 536.87"
    assert bounds["heterogeneous"] == pytest.approx(6.711, abs=0.001)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("peers = 3", "no list of"),
        ("[[host]]\nup_mbit = 1\ndown_mbit = 1", "1 hosts"),
        ("[[host]]\nup_mbit = 1\ndown_mbit = 1\nreachable = false\n" * 2, "everyone must reach"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "profile.toml").write_text(text)
    with pytest.raises(BadProfile, match=says):
        read_profile(tmp_path / "profile.toml")


HET = read_profile(PROFILES / "heterogeneous.toml")


def test_faults_are_read() -> None:
    assert read_fault("kill", "fastest@.25", HET) == Fault(kind="kill", host=9, fraction=0.25)
    assert read_fault("stall", "2@0.5:up", HET) == Fault(kind="stall-up", host=2, fraction=0.5)
    for kind, text in (("kill", "4"), ("stall", "4@1.5"), ("kill", "1@0.5"), ("kill", "4@0.5:up")):
        with pytest.raises(BadProfile):
            read_fault(kind, text, HET)  # type: ignore[arg-type]
    assert fastest(read_profile(PROFILES / "heterogeneous-fast-unreachable.toml")) == 5, "one that can be dialled"


def test_who_is_waited_for_after_faults() -> None:
    kill = Fault(kind="kill", host=4, fraction=0.5)
    stall = Fault(kind="stall", host=5, fraction=0.5)
    up = Fault(kind="stall-up", host=6, fraction=0.5)
    assert 4 not in after(HET, kill).peers
    assert 5 not in after(HET, stall).peers
    assert after(HET, up).peers[6] == HostLink(up_mbit=1.0, down_mbit=200)
    assert sorted(survivors(HET, [kill, stall, up]).peers) == [2, 3, 6, 7, 8, 9]


def test_the_bound_with_faults_takes_each_stretch_by_itself() -> None:
    kill = Fault(kind="kill", host=9, fraction=0.5)
    # 8 peers share 640 Mbit/s for one half, 7 peers 440 for the other.
    assert bound_with_faults_s(BYTES_PER_MBIT, HET, [kill]) == pytest.approx(0.5 * 8 / 640 + 0.5 * 7 / 440)
    late = Fault(kind="stall-up", host=8, fraction=0.75)
    expected = 0.5 * 8 / 640 + 0.25 * 7 / 440 + 0.25 * 7 / 341
    assert bound_with_faults_s(BYTES_PER_MBIT, HET, [late, kill]) == pytest.approx(expected)
    assert bound_with_faults_s(BYTES_PER_MBIT, HET, []) == bound_s(BYTES_PER_MBIT, HET)


def test_faults_leave_somebody_to_wait_for() -> None:
    two = profile(10, (5, 5, True), (6, 6, True))
    kill = Fault(kind="kill", host=2, fraction=0.5)
    check_faults(two, [kill, Fault(kind="stall-up", host=3, fraction=0.5)])
    with pytest.raises(BadProfile, match="left to wait for"):
        check_faults(two, [kill, Fault(kind="stall", host=3, fraction=0.5)])
    with pytest.raises(BadProfile, match="one fault"):
        check_faults(two, [kill, Fault(kind="stall-up", host=2, fraction=0.7)])


# -- figures ---------------------------------------------------------------------------------------------------

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


def test_totals_of_cpu_lie_on_a_line_and_bytes_sent_do_not() -> None:
    assert [cpu_s_at(SAMPLES, at) for at in (99.0, 101.0, 103.0, 200.0)] == [5.0, 5.5, 8.0, 10.0]
    stretches = ((100.0, 102.0), (101.9, 102.1), (102.0, 104.0), (99.0, 200.0))
    assert [sent_between(SAMPLES, *one) for one in stretches] == [2_000_000, 2_400_000, 400_000, 2_400_000]


def test_repeats_give_medians_and_all_ratios() -> None:
    runs = [{"ratio": ratio, "encrypted": True, "sent": sent} for ratio, sent in ((1.3, 7), (1.1, 9), (1.2, 5))]
    assert medians(runs) == {"ratio": 1.2, "encrypted": True, "sent": 7, "ratios": [1.3, 1.1, 1.2]}


def test_a_fault_that_came_after_the_end_is_no_measurement() -> None:
    fault = Fault(kind="stall-up", host=3, fraction=0.5)
    with pytest.raises(TransferFailed, match="before the fault"):
        figures_of(transfer(faults_s=[103.0]), PEERS, [fault])
