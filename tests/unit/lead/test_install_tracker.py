"""How long a version takes to be installed everywhere."""

from __future__ import annotations

from swarm.lead.publication import MAX_FOLLOWED, InstallTracker
from swarm.types import NodeId
from tests.builders import ALICE, BOB, v


def test_a_version_is_broadcast_when_the_last_sampler_holds_it() -> None:
    tracker = InstallTracker()
    tracker.installed(ALICE, v(0), now=0.0)
    tracker.installed(BOB, v(0), now=0.0)
    tracker.published(v(1), now=10.0)
    tracker.installed(ALICE, v(1), now=11.0)
    tracker.installed(ALICE, v(0), now=12.0)  # It never goes back
    assert tracker.last_broadcast_s is None
    assert tracker.install_s(ALICE, v(1)) == 1.0
    assert tracker.install_s(BOB, v(1)) is tracker.install_s(ALICE, v(2)) is None
    assert tracker.skipped_s(v(8), v(9)) == 0.0
    tracker.published(v(2), now=13.0)
    tracker.installed(BOB, v(2), now=13.5)
    assert tracker.last_broadcast_s == 3.5, "a newer version counts for the older one"


def test_it_tells_when_the_newest_version_is_everywhere_and_not_of_older_ones() -> None:
    tracker, told = InstallTracker(), list[int]()
    tracker.on_everywhere = lambda: told.append(1)
    for number in (1, 2):
        tracker.published(v(number), now=0.0)
    tracker.installed(ALICE, v(1), now=1.0)
    assert told == []
    tracker.installed(ALICE, v(2), now=2.0)
    assert told == [1]
    tracker.published(v(3), now=3.0)
    tracker.gone(ALICE, now=4.0)
    assert (told, tracker.last_broadcast_s) == ([1, 1], 2.0), "to nobody, once nobody is left"


def test_the_oldest_of_too_many_open_versions_is_given_up() -> None:
    tracker = InstallTracker()
    for number in range(MAX_FOLLOWED + 1):
        tracker.published(v(number), now=float(number))
    tracker.installed(ALICE, v(0), now=100.0)
    assert tracker.last_broadcast_s is None
    tracker.installed(ALICE, v(1), now=101.0)
    assert tracker.last_broadcast_s == 100.0


def test_the_spread_of_a_version_over_the_samplers() -> None:
    tracker = InstallTracker()
    nodes = [NodeId(f"{i:032x}") for i in range(10)]
    for node in nodes:
        tracker.installed(node, v(0), now=0.0)
    tracker.published(v(1), now=10.0)
    assert tracker.spread_s(v(1)) == {"50": None, "90": None, "100": None}
    for seconds, node in enumerate(nodes[:9], start=1):
        tracker.installed(node, v(1), now=10.0 + seconds)
    assert tracker.spread_s(v(1)) == {"50": 5.0, "90": 9.0, "100": None}
    tracker.gone(nodes[9], now=30.0)
    assert (tracker.spread_s(v(1))["100"], tracker.last_broadcast_s) == (9.0, 20.0), "it is no longer waited for"
