"""Profiles, faults and the four-term bound of the broadcast benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.links import (
    BYTES_PER_MBIT,
    BadProfile,
    Fault,
    HostLink,
    Profile,
    after,
    bound_s,
    bound_with_faults_s,
    check_faults,
    equal_profile,
    fastest,
    profile_of,
    read_fault,
    read_profile,
    survivors,
)

PROFILES = Path(__file__).parents[3] / "benchmarks" / "profiles"
MIB_64 = 64 << 20

NAMED = ("homogeneous", "heterogeneous", "sixteen", "half-unreachable")


def profile(learner_up: float, *peers: tuple[float, float, bool]) -> Profile:
    tables = [{"up_mbit": up, "down_mbit": down, "reachable": reachable} for up, down, reachable in peers]
    return profile_of("test", [{"up_mbit": learner_up, "down_mbit": 100.0}, *tables])


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


def test_the_bounds_of_the_issue() -> None:
    """64 MiB in decimal Mbit: 536.87."""
    assert bound_s(MIB_64, read_profile(PROFILES / "homogeneous.toml")) == pytest.approx(10.737, abs=0.001)
    assert bound_s(MIB_64, read_profile(PROFILES / "heterogeneous.toml")) == pytest.approx(6.711, abs=0.001)
    assert bound_s(MIB_64, read_profile(PROFILES / "sixteen.toml")) == pytest.approx(21.475, abs=0.001)


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
            replace(link, up_mbit=link.up_mbit / 2),
            replace(link, down_mbit=link.down_mbit / 2),
            replace(link, reachable=False),
        ):
            assert bound_s(MIB_64, replace(links, peers={**links.peers, number: worse})) >= least


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_profile_here_can_be_read_and_says_what_it_is(path: Path) -> None:
    read = read_profile(path)
    assert read.name == path.stem
    assert bound_s(MIB_64, read) > 0
    assert path.read_text().startswith("# ")


def test_the_named_profiles_are_there_and_hold_outs_too() -> None:
    names = {path.stem for path in PROFILES.glob("*.toml")}
    assert set(NAMED) <= names
    assert sum(name.startswith("holdout-") for name in names) >= 5
    assert [link.up_mbit for link in read_profile(PROFILES / "heterogeneous.toml").peers.values()] == [
        *(10, 20, 30, 50, 50, 80, 100, 200)
    ]


def test_options_alone_make_all_links_alike() -> None:
    made = equal_profile(3, 25, 50)
    assert list(made.hosts) == [1, 2, 3, 4]
    assert set(made.hosts.values()) == {HostLink(up_mbit=25, down_mbit=50)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "list of"),
        ("[host]\nup_mbit = 1", "list of"),
        ("peers = 3", "list of"),
        ("[[host]]\nup_mbit = 1\ndown_mbit = 1", "1 hosts"),
        ("[[host]]\nup_mbit = 1\n[[host]]\nup_mbit = 1", "host 1 needs a number above zero as down_mbit"),
        ("[[host]]\nup_mbit = 0\ndown_mbit = 1\n[[host]]", "up_mbit, not 0"),
        ("[[host]]\nup_mbit = inf\ndown_mbit = 1\n[[host]]", "up_mbit, not inf"),
        ("[[host]]\nup_mbit = nan\ndown_mbit = 1\n[[host]]", "up_mbit, not nan"),
        ("[[host]]\nup_mbit = true\ndown_mbit = 1\n[[host]]", "up_mbit, not True"),
        ("[[host]]\nup_mbps = 5\n[[host]]", "unknown key 'up_mbps'"),
        ("[[host]]\nup_mbit = 1\ndown_mbit = 1\nreachable = 1\n[[host]]", "true or false"),
        ("host = [1, 2]", "host 1 is no table"),
        ("[[host]]\nup_mbit = 1\ndown_mbit = 1\nreachable = false\n" * 2, "everybody must reach it"),
        ("[[", "cannot read"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(text)
    with pytest.raises(BadProfile, match=says) as refused:
        read_profile(path)
    assert "\n" not in str(refused.value)


def test_no_such_profile(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="cannot read"):
        read_profile(tmp_path / "none.toml")


HET = read_profile(PROFILES / "heterogeneous.toml")


def test_faults_are_read() -> None:
    assert read_fault("kill", "4@0.5", HET) == Fault(kind="kill", host=4, fraction=0.5)
    assert read_fault("kill", "fastest@.25", HET) == Fault(kind="kill", host=9, fraction=0.25)
    assert read_fault("stall", "2@0", HET) == Fault(kind="stall", host=2, fraction=0.0)
    assert read_fault("stall", "2@0.5:up", HET) == Fault(kind="stall-up", host=2, fraction=0.5)


@pytest.mark.parametrize(
    "text", ["", "4", "@0.5", "4@1", "4@1.5", "4@-0.5", "1@0.5", "10@0.5", "slowest@0.5", "4@0.5:down"]
)
def test_other_faults_are_refused(text: str) -> None:
    for kind in ("kill", "stall"):
        with pytest.raises(BadProfile):
            read_fault(kind, text, HET)
    with pytest.raises(BadProfile):
        read_fault("kill", "4@0.5:up", HET)


def test_the_fastest_relay_is_one_that_can_be_dialled() -> None:
    assert fastest(HET) == 9
    assert fastest(read_profile(PROFILES / "heterogeneous-fast-unreachable.toml")) == 5
    assert fastest(profile(10, (5, 5, False), (6, 6, False))) == 3


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
    kill, stall = Fault(kind="kill", host=2, fraction=0.5), Fault(kind="stall", host=3, fraction=0.5)
    check_faults(two, [kill])
    check_faults(two, [kill, Fault(kind="stall-up", host=3, fraction=0.5)])
    with pytest.raises(BadProfile, match="left to wait for"):
        check_faults(two, [kill, stall])
    with pytest.raises(BadProfile, match="one fault"):
        check_faults(two, [kill, Fault(kind="stall-up", host=2, fraction=0.7)])
