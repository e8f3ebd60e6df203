"""When a swarm may be published to."""

from __future__ import annotations

from typing import Any

from benchmarks.broadcast import STEADY_S, Readiness
from benchmarks.links import HostLink, equal_profile, profile_of


def _statuses(streams: dict[int, int], leaves: tuple[int, ...] = ()) -> dict[int, dict[str, Any]]:
    return {n: {"streams": count, "reachability": "leaf" if n in leaves else "public"} for n, count in streams.items()}


def test_a_swarm_is_ready_when_its_streams_are_all_there_or_stay_as_they_are() -> None:
    readiness = Readiness(equal_profile(2, 50, 100))
    assert readiness.is_reached(_statuses({1: 2, 2: 2, 3: 2}), now=1.0)
    chain = _statuses({1: 1, 2: 2, 3: 1})
    assert not readiness.is_reached(chain, now=10.0)
    assert readiness.is_reached(chain, now=10.0 + STEADY_S)
    for now in (100.0, 200.0):
        assert not readiness.is_reached(_statuses({1: 1, 2: 1, 3: 0}), now=now), "one has no stream"
    for now in (300.0, 400.0):
        assert not readiness.is_reached(_statuses({1: 2, 2: 2}), now=now), "one does not answer"


def test_peers_must_be_public_or_not_as_the_profile_has_it() -> None:
    link, leaf = (HostLink(up_mbit=50, down_mbit=100, reachable=reachable) for reachable in (True, False))
    readiness, streams = Readiness(profile_of("two leaves", [link, link, leaf, leaf])), {1: 3, 2: 3, 3: 2, 4: 2}
    for wrong in ((2, 3, 4), (3,)):
        assert not readiness.is_reached(_statuses(streams, leaves=wrong), now=50.0)
    assert readiness.is_reached(_statuses(streams, leaves=(3, 4)), now=50.0)
